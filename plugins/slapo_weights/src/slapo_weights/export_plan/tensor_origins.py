"""Origin of each exported tensor: a piece, or part of one, and its name in the unmodified model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from slapo_core import BuildError
from slapo_training.model import Chunk, Span, chunks_of, with_dim

from ..huggingface.unmodified_model import UnmodifiedModel
from ..tensor_views.fused_parameters import FusedParts
from .export_source import ExportSource

_SHOWN = 8


class Origin(NamedTuple):
    """Origin of a tensor.

    Args:
        is_added: Whether it is a parameter that a step added without declaring its parts.
        is_known: Whether the unmodified model had it; False for buffers that a step added.
        spans: Parts of the piece that it consists of; None for the whole piece.
    """

    key: str
    names: tuple[str, ...]
    is_added: bool = False
    is_known: bool = True
    spans: tuple[Span, ...] | None = None

    def chunks(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        return chunks_of(chunks, self.spans)

    def shape(self, full_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor, given that of the whole piece."""
        if self.spans is None:
            return full_shape
        return with_dim(full_shape, self.spans[0].dim, max(span.start + span.size for span in self.spans))


def origins(source: ExportSource, held: Iterable[str]) -> list[Origin]:
    """Return the origins of all parameters and of the buffers that some rank holds, in the order of ``state_dict``."""
    names, added, made, there = source.names(), source.added_parameters(), source.made_of(), dict.fromkeys(held)
    first_of = {name: first for first, all_names in added.items() for name in all_names}
    keys = (first_of.get(name, name) for name, is_buffer in source.order() if name in there or not is_buffer)
    found: list[Origin] = []
    for key in dict.fromkeys([*keys, *there]):
        if key in made:
            found += _parts(key, made[key])
        else:
            found.append(Origin(key, names.get(key) or added.get(key) or (key,), key in added, key in names))
    return found


def by_written_name(found: Iterable[Origin], unmodified: UnmodifiedModel | None) -> dict[str, Origin]:
    """Return the origins by the names that ``save_pretrained`` converts from, in the order of the unmodified model.

    A parameter that a step added is written only if a Transformers' model has a tensor of that name.

    Raises:
        BuildError: the scheduled model has tensors that the unmodified one lacks, or lacks some.
    """
    if unmodified is None:
        _refuse([origin for origin in found if origin.is_added])
        return _once((origin.names[0], origin) for origin in found)
    shapes, left_out = unmodified.shapes(), set(unmodified.model._keys_to_ignore_on_save or ())
    known = [origin for origin in found if origin.is_added or origin.is_known or origin.key in shapes]
    _refuse([origin for origin in known if origin.is_added and not shapes.keys() >= {*origin.names}])
    kept = unmodified.written_names(origin.names for origin in known)
    names = {name for origin in known for name in origin.names}
    if missing := [name for name in shapes if name not in names and name not in left_out]:
        raise BuildError(
            f"export_weights: the scheduled model lacks {_quote(missing)} of {unmodified.name}, which a step took out or put "
            "together with others without saying so (made_of); export a schedule without that step"
        )
    chosen = _once((next((name for name in origin.names if name in kept), origin.names[0]), origin) for origin in known)
    ordered = dict.fromkeys(name for name in [*shapes, *chosen] if name in chosen and name not in left_out)
    return {name: chosen[name] for name in ordered}


def _parts(key: str, made: FusedParts) -> list[Origin]:
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


def _refuse(added: list[Origin]) -> None:
    if added:
        raise BuildError(
            f"export_weights: {_quote([each.key for each in added])} came in by a step, which does not say what of "
            "(made_of), and the unmodified model has no tensor of that name; export a schedule without that step"
        )


def _quote(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
