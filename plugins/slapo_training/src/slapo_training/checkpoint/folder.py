"""The folder of a checkpoint: written aside, summed up, and put in the place of the one before in one moment.

The files lie in a folder of their own inside of it, ``data-…``, which the manifest ``slapo.json`` names together with their
sizes and SHA-256 sums. The manifest is written last and renamed into its place, so that the folder has the checkpoint before or
the new one, whole, and what a crash leaves behind is named by nothing; the next save removes it. Who writes holds the lock of
``slapo.lock``, which ends with its process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

from slapo_core import BuildError, SlapoError, failure_reason, get_logger

from ..distributed.ranks import Ranks
from .manifest import FORMAT, MANIFEST, content_in, data_of, folder_of, has_foreign_manifest, read, target_of, text_of

_LOCK = "slapo.lock"
_DATA = "data-"
_LEFT_DATA, _LEFT_MANIFEST = (re.compile(re.escape(name) + "[0-9a-f]{32}") for name in (_DATA, f"{MANIFEST}."))
_SHOWN = 8
_BLOCK = 1 << 22


@dataclass
class CheckpointWriter:
    """A checkpoint that is being written.

    Args:
        folder: Where it is to be.
        data: Where its files go.
        number: One that no other checkpoint has.
        target: Whose it is.
    """

    folder: Path
    data: Path
    number: str
    target: str
    _lock: int | None = field(default=None, init=False)

    @staticmethod
    def proposed(path: str | PathLike[str], target: str) -> tuple[str, str]:
        """What one rank says of a checkpoint it is to write, where nothing is changed yet: for ``agreed``.

        Raises:
            BuildError: another target's checkpoint is there, something else of its name, or a file; or it is no path.
        """
        folder = folder_of(path)
        if folder.exists() and not folder.is_dir():
            raise BuildError(f"{fspath(path)!r} is a file; give a folder")
        if has_foreign_manifest(folder):
            raise BuildError(f"{fspath(path)!r} has a {MANIFEST} that is no checkpoint's; give another folder, or move it away")
        if (whose := target_of(folder)) not in (None, target):
            raise BuildError(
                f"{fspath(path)!r} has a checkpoint of target {whose!r}, and this engine is of {target!r}; give another folder"
            )
        return os.path.abspath(path), uuid.uuid4().hex

    @classmethod
    def agreed(cls, ranks: Sequence[tuple[str, str]], target: str) -> CheckpointWriter:
        """The checkpoint that all ranks write, from what each has proposed.

        Raises:
            BuildError: they were given different folders.
        """
        folders = list(dict.fromkeys(folder for folder, _ in ranks))
        if len(folders) > 1:
            raise BuildError(f"the ranks save to {folders[0]!r} and {folders[1]!r}; give every rank the same folder")
        folder, number = Path(folders[0]), ranks[0][1]
        return cls(folder, folder / (_DATA + number), number, target)

    def begin(self, ranks: Ranks) -> None:
        """Make the folder, without what crashes have left in it. Collective.

        Raises:
            BuildError: another save writes there.
        """

        def make() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.folder)
            if (kept := data_of(self.folder)) is not None:
                _remove_orphans(self.folder, kept)
            self.data.mkdir()

        ranks.run_on_first(make)

    def commit(self, about: Mapping[str, Any], ranks: Ranks) -> None:
        """Sum up the files that all ranks have written, and let the checkpoint take its place. Collective.

        Args:
            about: What is written of it, plain data.
            ranks: All that wrote.
        """

        def look() -> dict[str, int]:
            found = (file for file in self.data.rglob("*") if file.is_file())
            return {file.relative_to(self.data).as_posix(): file.stat().st_size for file in found}

        def sum_up() -> dict[str, str]:
            return {name: _sha256(self.data / name, is_new=True) for name in _own_share(sizes, ranks)}

        def put() -> None:
            files = {name: [sizes[name], total] for own in everyone for name, total in own.items()}
            for each in {self.data, *(directory for directory in self.data.rglob("*") if directory.is_dir())}:
                _sync(each)
            content = {"format": FORMAT, "target": self.target, "number": self.number, "data": self.data.name, "files": files}
            made = self.folder / f"{MANIFEST}.{self.number}"
            made.write_text(text_of({**content, **about}))
            _sync(made)
            os.replace(made, self.folder / MANIFEST)
            for each in (self.folder, self.folder.parent):
                try:
                    _sync(each)
                except OSError as err:
                    get_logger().warning(
                        "the new checkpoint in %r may not outlive a power cut: %s", str(each), failure_reason(err)
                    )
            _remove_orphans(self.folder, self.data.name)
            self._unlock()

        sizes: dict[str, int] = ranks.run_on_first(look)
        everyone: list[dict[str, str]] = ranks.run_on_all(sum_up)
        ranks.run_on_first(put)

    @contextmanager
    def cleanup_on_error(self, ranks: Ranks) -> Iterator[Ranks]:
        """The ranks that write it: what one cannot do is one sentence on all, and what was written is removed then.

        The first rank removes it, which also puts it into its place: another one may give up waiting while that is done.
        """
        try:
            yield ranks.with_error_wrapper(self._as_build_error)
        except BaseException:
            if ranks.index == 0:
                if data_of(self.folder) != self.data.name:
                    shutil.rmtree(self.data, ignore_errors=True)
                self._unlock()
            raise

    def _as_build_error(self, error: Exception) -> Exception:
        if isinstance(error, SlapoError):
            return error
        why = error.strerror if isinstance(error, OSError) and error.strerror else failure_reason(error)
        told = BuildError(f"the checkpoint {fspath(self.folder)!r} was not written, and what was there is as before: {why}")
        told.__cause__ = error
        return told

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also where a process that was forked meanwhile has it open
            os.close(lock)


class Checkpoint(NamedTuple):
    """One that is complete.

    Args:
        folder: The whole of it.
        data: Where its files are.
        about: What was written of it.
    """

    folder: Path
    data: Path
    about: dict[str, Any]


def open_checkpoint(path: str | PathLike[str], target: str, ranks: Ranks) -> Checkpoint:
    """A complete checkpoint, whose files are not looked at yet. Collective.

    Raises:
        BuildError: on every rank: there is none, it is another target's, or the ranks have different ones.
    """
    everyone = ranks.run_on_all(lambda: read(folder_of(path), target))
    about: dict[str, Any] = everyone[ranks.index]
    if len({each["number"] for each in everyone}) > 1:
        raise BuildError("the ranks load different checkpoints; give every rank the same one")
    return Checkpoint(Path(path), Path(path) / about["data"], about)


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Around what reads a checkpoint before anything is changed: a save that put another in its place is told as such.

    Raises:
        BuildError: on every rank.
    """
    try:
        yield
    except Exception as err:
        now = content_in(checkpoint.folder)
        if now is not None and now["number"] != checkpoint.about["number"]:
            raise BuildError(f"{fspath(checkpoint.folder)!r} was saved anew while it was loaded; load it again") from err
        raise


def verify(checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Refuse files that are not what was written. Collective; each rank reads a share of them.

    Raises:
        BuildError: the same on every rank: some are damaged or missing.
    """
    files = checkpoint.about["files"]
    own = _own_share({name: size for name, (size, _) in files.items()}, ranks)
    found = [fault for name in own for fault in _checksum_errors(checkpoint.data, name, files)]
    faults = sorted(fault for each in ranks.gather(found) for fault in each)
    if faults:
        more = f", and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        shown = ", ".join(faults[:_SHOWN]) + more
        raise BuildError(f"the checkpoint {fspath(checkpoint.folder)!r} is damaged: {shown}; load another one")


def _locked(folder: Path) -> int | None:
    """The lock of a folder, which ends with the process; None on a file system that has none.

    Raises:
        BuildError: another save holds it.
    """
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        os.close(lock)
        raise BuildError(f"another save writes to {fspath(folder)!r} now; give another folder, or wait for its end") from err
    except OSError as err:
        os.close(lock)
        get_logger().warning("%r has no locks; let one program at a time save there: %s", fspath(folder), failure_reason(err))
        return None
    return lock


def _remove_orphans(folder: Path, kept: str) -> None:
    """Remove what crashes have left and no checkpoint names; what cannot be removed now stays for the next time.

    Nothing else that is called like it: a user's own ``data-2024``, say.
    """
    for each in folder.iterdir():
        if _LEFT_DATA.fullmatch(each.name) and each.name != kept:
            shutil.rmtree(each, ignore_errors=True)
        elif _LEFT_MANIFEST.fullmatch(each.name):
            each.unlink(missing_ok=True)


def _own_share(sizes: Mapping[str, int], ranks: Ranks) -> Iterable[str]:
    """This rank's share of the files, about as many bytes as the others'."""
    loads = [0] * ranks.size
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        place = loads.index(min(loads))
        loads[place] += sizes[name] + 1
        if place == ranks.index:
            yield name


def _checksum_errors(data: Path, name: str, files: Mapping[str, tuple[int, str]]) -> Iterable[str]:
    size, total = files[name]
    try:
        if (found := (data / name).stat().st_size) != size:
            yield f"{name!r} has {found} bytes and not {size}"
        elif _sha256(data / name) != total:
            yield f"{name!r} has other bytes than were written"
    except FileNotFoundError:
        yield f"{name!r} is missing"
    except OSError as err:
        yield f"{name!r} cannot be read, {failure_reason(err)}"


def _sha256(file: Path, is_new: bool = False) -> str:
    """The SHA-256 of a file, which is on the disk then if it is new."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        if is_new:
            os.fsync(stream.fileno())
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
