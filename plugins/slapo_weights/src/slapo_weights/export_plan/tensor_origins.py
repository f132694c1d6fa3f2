"""Where each tensor that is written comes from: a piece, or part of one, by its name in the unmodified model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from slapo_core import BuildError
from slapo_training.model import Chunk, Span, chunks_of, with_dim

from ..huggingface.unmodified_model import Unmodified
from ..tensor_views.fused_parameters import MadeOf
from .export_source import Source

_SHOWN = 8


class Origin(NamedTuple):
    """Where a tensor comes from.

    Args:
        key: Name of the piece.
        names: Of the tensor in the unmodified model.
        is_stranger: Whether it is a parameter that a step brought in without saying what it is made of.
        is_known: Whether the unmodified model had it; not so buffers that a step brought in.
        spans: Of which parts of the piece it consists; None for all of it.
    """

    key: str
    names: tuple[str, ...]
    is_stranger: bool = False
    is_known: bool = True
    spans: tuple[Span, ...] | None = None

    def chunks(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Boxes of the piece as boxes of the tensor."""
        return chunks_of(chunks, self.spans)

    def shape(self, full_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the tensor, from that of the piece's."""
        if self.spans is None:
            return full_shape
        return with_dim(full_shape, self.spans[0].dim, max(span.start + span.size for span in self.spans))


def origins(source: Source, held: Iterable[str]) -> list[Origin]:
    """Of all parameters, and the buffers that are held, in the order of ``state_dict``.

    Args:
        source: What is exported.
        held: Names of all ranks' pieces.
    """
    names, strangers, made, there = source.names(), source.strangers(), source.made_of(), dict.fromkeys(held)
    first_of = {name: first for first, all_names in strangers.items() for name in all_names}
    keys = (first_of.get(name, name) for name, is_buffer in source.order() if name in there or not is_buffer)
    found: list[Origin] = []
    for key in dict.fromkeys([*keys, *there]):
        if key in made:
            found += _parts(key, made[key])
        else:
            found.append(Origin(key, names.get(key) or strangers.get(key) or (key,), key in strangers, key in names))
    return found


def by_written_name(found: Iterable[Origin], unmodified: Unmodified | None) -> dict[str, Origin]:
    """Each under the name that it is written under before Transformers converts it, in the order of the unmodified model.

    What a step brought in has its place where a model of Transformers has a tensor of that name.

    Raises:
        BuildError: the scheduled model has tensors that the unmodified one lacks, or lacks some.
    """
    if unmodified is None:
        _refuse([origin for origin in found if origin.is_stranger])
        return _once((origin.names[0], origin) for origin in found)
    shapes, left_out = unmodified.shapes(), unmodified.left_out()
    known = [origin for origin in found if origin.is_stranger or origin.is_known or origin.key in shapes]
    _refuse([origin for origin in known if origin.is_stranger and not shapes.keys() >= {*origin.names}])
    kept = unmodified.written_names(origin.names for origin in known)
    names = {name for origin in known for name in origin.names}
    if missing := [name for name in shapes if name not in names and name not in left_out]:
        raise BuildError(
            f"export_weights: the scheduled model lacks {_listed(missing)} of {unmodified.name}, which a step took out or put "
            "together with others without saying so (made_of); export a schedule without that step"
        )
    chosen = _once((next((name for name in origin.names if name in kept), origin.names[0]), origin) for origin in known)
    ordered = dict.fromkeys(name for name in [*shapes, *chosen] if name in chosen and name not in left_out)
    return {name: chosen[name] for name in ordered}


def _parts(key: str, made: MadeOf) -> list[Origin]:
    spans: dict[str, list[Span]] = {}
    at = 0
    for name, (start, stop), _ in made.parts:
        spans.setdefault(name, []).append(Span(made.dim, at, start, stop - start))
        at += stop - start
    for name, _, size in made.parts:
        edges = sorted((span.start, span.start + span.size) for span in spans[name])
        if [0, *(stop for _, stop in edges)] != [*(start for start, _ in edges), size]:
            raise BuildError(
                f"export_weights: {key!r} is said to be made of {name!r} (made_of), but not of each part of it once; "
                "export a schedule without that step"
            )
    return [Origin(key, (name,), spans=tuple(own)) for name, own in spans.items()]


def _once(named: Iterable[tuple[str, Origin]]) -> dict[str, Origin]:
    found: dict[str, Origin] = {}
    for name, origin in named:
        if (other := found.setdefault(name, origin)) is not origin:
            raise BuildError(f"export_weights: {other.key!r} and {origin.key!r} are both {name!r} of the unmodified model")
    return found


def _refuse(strangers: list[Origin]) -> None:
    if strangers:
        raise BuildError(
            f"export_weights: {_listed([each.key for each in strangers])} came in by a step, which does not say what of "
            "(made_of), and the unmodified model has no tensor of that name; export a schedule without that step"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
