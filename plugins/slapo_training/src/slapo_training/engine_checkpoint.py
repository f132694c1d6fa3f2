"""The directory of an engine's checkpoint: the engine's own files, what they are of, and each rank's random states."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slapo_core.errors import BuildError
from slapo_core.program import Program

from . import checkpoint_folder, random_state
from .checkpoint_folder import Checkpoint, Writing
from .plain import check_plain
from .ranks import Ranks

_POSITION = "position.pt"


class Position(NamedTuple):
    """Where training was.

    Args:
        steps: Batches that were trained.
        extra: What the user gave to ``save``, the same on every rank.
    """

    steps: int
    extra: Any

    def words(self) -> str:
        """What one rank has, for ``check_same``; ``BuildError`` where it is not plain data."""
        check_plain(self.extra, "extra")
        return repr(self.extra)

    @staticmethod
    def check_same(ranks: Iterable[str]) -> None:
        """Raise ``BuildError`` where ranks have said different words."""
        if len(set(ranks)) > 1:
            raise BuildError("the ranks save different extra; give all of them the same, as it is kept once")


def prepared(
    path: str | PathLike[str],
    target: str,
    program: Program,
    about: Mapping[str, Any],
    position: Position,
    collect: Callable[[Path], Callable[[Ranks], None]],
    ranks: Ranks,
) -> Callable[[Ranks], None]:
    """What writes a checkpoint, given the ranks to meet, collective as well. Collective.

    Args:
        path: The same folder on every rank; made where there is none.
        target: Whose it is.
        program: Whose ranks.
        about: What is written of it, the same on every rank.
        position: Where training is.
        collect: Given the folder of the engine's own files, gives what writes them, given the ranks to meet. Both collective,
            and they raise on all ranks.
        ranks: All of the program.

    Raises:
        BuildError: on every rank: it failed on one, the ranks have different folders, or it has another target's checkpoint;
            the checkpoint that was there is as it was. What is given raises it, too.
    """
    said = ranks.on_all(lambda: (Writing.proposed(path, target), position.words()))
    writing = Writing.agreed([proposed for proposed, _ in said], target)
    position.check_same(words for _, words in said)
    about = {**about, "layout_of_ranks": layout_of(program)}
    files: dict[str, bytes] = {}

    def gather() -> None:
        files[_random_file(ranks.place)] = bytes_of(random_state.packed())
        if ranks.place == 0:
            files[_POSITION] = bytes_of(position._asdict())

    def put() -> None:
        for name, content in files.items():
            (writing.data / name).write_bytes(content)

    def write(meeting: Ranks) -> None:
        with _dropping(writing):
            fill(meeting)
            meeting.on_all(put)
            writing.seal(about, meeting)

    with _dropping(writing):
        writing.begin(ranks)
        fill = collect(writing.data)
        ranks.on_all(gather)
    return write


@contextmanager
def _dropping(writing: Writing) -> Iterator[None]:
    """Remove what was written where it breaks off."""
    try:
        yield
    except Exception:
        writing.drop()
        raise


def bytes_of(value: Any) -> bytes:
    """What ``torch.save`` writes of a value as it is now."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def opened(path: str | PathLike[str], target: str, program: Program) -> Checkpoint:
    """A complete checkpoint, whose files are not looked at yet. Collective.

    Raises:
        BuildError: on every rank: it is not complete, another target's, or not the same on all.
    """
    return checkpoint_folder.opened(path, target, Ranks.of(program))


def verify(checkpoint: Checkpoint, program: Program) -> None:
    """Raise ``BuildError`` on every rank unless every byte is what was written. Collective."""
    checkpoint_folder.verify(checkpoint, Ranks.of(program))


def read_position(checkpoint: Checkpoint) -> Position:
    """Where training was."""
    return Position(**torch.load(checkpoint.data / _POSITION, weights_only=True))


def read_random(checkpoint: Checkpoint, program: Program) -> Any:
    """The random states of this rank, and what puts them back: derived ones on another layout. Collective.

    Raises:
        BuildError: they cannot be put back in this process.
    """
    ranks = Ranks.of(program)
    is_same = checkpoint.about["layout_of_ranks"] == layout_of(program)
    found: list[Any] = []

    def read() -> None:
        saved = torch.load(checkpoint.data / _random_file(ranks.place if is_same else 0), weights_only=True)
        if is_same:
            random_state.check(saved)
        found.append(saved if is_same else random_state.digest_of(saved))

    ranks.on_all(read)
    return found[0]


def put_random(found: Any) -> None:
    """Put back what ``read_random`` gave."""
    if isinstance(found, int):
        random_state.derive(found)
    else:
        random_state.put(found)


def layout_of(program: Program) -> dict[str, int]:
    """How many ranks are along each axis."""
    return {axis: program.axis_size(axis) for axis in ("pp", "dp", "tp")}


def _random_file(place: int) -> str:
    return f"random-{place}.pt"
