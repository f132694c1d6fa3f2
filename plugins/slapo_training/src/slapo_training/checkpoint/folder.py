"""Folder of a checkpoint, whose new content replaces the old one atomically.

The files are in a sub-folder ``data-…``. The manifest ``slapo.json`` names the sub-folder, and sizes and SHA-256 sums of the
files. Files of a crashed save are in no manifest; the next save removes them.
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
from dataclasses import dataclass, field, replace
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
    """Writer of one checkpoint.

    Args:
        number: Unique number of the checkpoint.
    """

    folder: Path
    data: Path
    number: str
    target: str
    _lock: int | None = field(default=None, init=False)

    @staticmethod
    def propose(path: str | PathLike[str], target: str) -> tuple[str, str]:
        """Return this rank's proposal for ``from_proposals``, before anything is written.

        Raises:
            BuildError: the path has another target's checkpoint, a foreign manifest, or a file; or it is not a path.
        """
        folder = folder_of(path)
        if folder.exists() and not folder.is_dir():
            raise BuildError(f"{fspath(path)!r} is a file; give a folder")
        if has_foreign_manifest(folder):
            raise BuildError(
                f"{fspath(path)!r} has a {MANIFEST} that does not belong to a checkpoint; give another folder, or move it away"
            )
        if (whose := target_of(folder)) not in (None, target):
            raise BuildError(
                f"{fspath(path)!r} has a checkpoint of target {whose!r}, and this engine is of {target!r}; give another folder"
            )
        return os.path.abspath(path), uuid.uuid4().hex

    @classmethod
    def from_proposals(cls, ranks: Sequence[tuple[str, str]], target: str) -> CheckpointWriter:
        """Return the writer of all ranks' checkpoint, from their proposals; raise ``BuildError`` for different folders."""
        folders = list(dict.fromkeys(folder for folder, _ in ranks))
        if len(folders) > 1:
            raise BuildError(f"the ranks save to {folders[0]!r} and {folders[1]!r}; give every rank the same folder")
        folder, number = Path(folders[0]), ranks[0][1]
        return cls(folder, folder / (_DATA + number), number, target)

    def begin(self, ranks: Ranks) -> None:
        """Make the folder, lock it, and remove files of crashed saves. Collective.

        Raises:
            BuildError: another save writes to the folder.
        """

        def make() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock_folder(self.folder)
            if (kept := data_of(self.folder)) is not None:
                _remove_orphans(self.folder, kept)
            self.data.mkdir()

        ranks.run_on_first(make)

    def commit(self, about: Mapping[str, Any], ranks: Ranks) -> None:
        """Compute the sums of all ranks' files, and put the manifest in place with further facts, plain data. Collective."""

        def look() -> dict[str, int]:
            found = (file for file in self.data.rglob("*") if file.is_file())
            return {file.relative_to(self.data).as_posix(): file.stat().st_size for file in found}

        def put() -> None:
            files = {name: [sizes[name], total] for own in everyone for name, total in own.items()}
            for each in {self.data, *(directory for directory in self.data.rglob("*") if directory.is_dir())}:
                _fsync(each)
            content = {"format": FORMAT, "target": self.target, "number": self.number, "data": self.data.name, "files": files}
            made = self.folder / f"{MANIFEST}.{self.number}"
            made.write_text(text_of({**content, **about}))
            _fsync(made)
            os.replace(made, self.folder / MANIFEST)
            for each in (self.folder, self.folder.parent):
                try:
                    _fsync(each)
                except OSError as err:
                    get_logger().warning(
                        "the new checkpoint in %r may not outlive a power cut: %s", str(each), failure_reason(err)
                    )
            _remove_orphans(self.folder, self.data.name)
            self._unlock()

        sizes: dict[str, int] = ranks.run_on_first(look)
        everyone: list[dict[str, str]] = ranks.run_on_all(
            lambda: {name: _sha256(self.data / name, is_new=True) for name in _own_share(sizes, ranks)}
        )
        ranks.run_on_first(put)

    @contextmanager
    def cleanup_on_error(self, ranks: Ranks) -> Iterator[Ranks]:
        """Context of the write; yields ranks whose errors become one ``BuildError``. An error removes the written files.

        The first rank removes them, as it also commits; another rank may time out while the first one commits.
        """
        try:
            yield replace(ranks, wrap_error=self._as_build_error)
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
            fcntl.flock(lock, fcntl.LOCK_UN)  # also unlocks if a forked process has the file open
            os.close(lock)


class Checkpoint(NamedTuple):
    """A complete checkpoint; ``about`` is the content of the manifest."""

    folder: Path
    data: Path
    about: dict[str, Any]


def open_checkpoint(path: str | PathLike[str], target: str, ranks: Ranks) -> Checkpoint:
    """Return a complete checkpoint, whose files are not verified yet. Collective.

    Raises:
        BuildError: on every rank: no checkpoint, one of another target, or different ones on different ranks.
    """
    everyone = ranks.run_on_all(lambda: read(folder_of(path), target))
    about: dict[str, Any] = everyone[ranks.index]
    if len({each["number"] for each in everyone}) > 1:
        raise BuildError("the ranks load different checkpoints; give every rank the same one")
    return Checkpoint(Path(path), Path(path) / about["data"], about)


@contextmanager
def read_context(checkpoint: Checkpoint) -> Iterator[None]:
    """Context of reads of a checkpoint; an error caused by a save that replaced it says so.

    Raises:
        BuildError: on every rank: the checkpoint was replaced.
    """
    try:
        yield
    except Exception as err:
        now = content_in(checkpoint.folder)
        if now is not None and now["number"] != checkpoint.about["number"]:
            raise BuildError(f"{fspath(checkpoint.folder)!r} was overwritten while it was loaded; load it again") from err
        raise


def verify(checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Verify the sums of all files. Collective; each rank reads a share of the files.

    Raises:
        BuildError: the same on every rank: files are damaged or missing.
    """
    files = checkpoint.about["files"]
    own = _own_share({name: size for name, (size, _) in files.items()}, ranks)
    found = [fault for name in own for fault in _checksum_errors(checkpoint.data, name, files)]
    faults = sorted(fault for each in ranks.gather(found) for fault in each)
    if faults:
        more = f", and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        shown = ", ".join(faults[:_SHOWN]) + more
        raise BuildError(f"the checkpoint {fspath(checkpoint.folder)!r} is damaged: {shown}; load another one")


def _lock_folder(folder: Path) -> int | None:
    """Lock a folder until the process ends; raise ``BuildError`` if another save holds the lock. None without locks."""
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
    """Remove files of crashed saves; files that cannot be removed stay for the next save.

    Similar names of a user's files are kept, e.g. ``data-2024``.
    """
    for each in folder.iterdir():
        if _LEFT_DATA.fullmatch(each.name) and each.name != kept:
            shutil.rmtree(each, ignore_errors=True)
        elif _LEFT_MANIFEST.fullmatch(each.name):
            each.unlink(missing_ok=True)


def _own_share(sizes: Mapping[str, int], ranks: Ranks) -> Iterable[str]:
    """Iterate over this rank's share of the files, balanced by size."""
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
    """Return the SHA-256 sum of a file; a new file is synchronized to disk first."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        if is_new:
            os.fsync(stream.fileno())
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
