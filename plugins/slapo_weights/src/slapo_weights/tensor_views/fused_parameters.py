"""Parts of a fused parameter that a step added: the map from the unmodified model's names to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from slapo_core import ScheduleError, parameter_facts

from .box_view import TensorView, concatenate

_ATTRIBUTE = "slapo_made_of"


class FusedParts(NamedTuple):
    """Composition of a fused parameter.

    Args:
        dim: Dimension along which its parts are concatenated.
        parts: Per part the name in the unmodified model, the range of it along ``dim``, and its whole size along ``dim``.
        padded: Size along ``dim`` including padding after the last part; None without padding.
    """

    dim: int
    parts: tuple[tuple[str, tuple[int, int], int], ...]
    padded: int | None = None


def made_of(
    parameter: torch.Tensor,
    parts: Iterable[torch.Tensor | tuple[torch.Tensor, int, int]],
    dim: int = 0,
    *,
    padded: bool = False,
) -> torch.Tensor:
    """Declare that a new parameter consists of parameters of the unmodified model, or of ranges of them.

    A primitive calls it for a parameter that it adds, so that weights can be loaded and exported. The declaration stays with
    the parameter when that is sharded, replaced or copied.

    Args:
        parameter: The new parameter, unsharded.
        parts: The old parameters in order, each with ``start, stop`` along ``dim`` if only a range is used.
        dim: Dimension along which they are concatenated; a negative one counts from the end.
        padded: Whether the parameter continues after the last part, as a vocabulary with more rows than tokens. The padding is
            loaded as 0 and not exported.

    Returns:
        ``parameter``.

    Raises:
        ScheduleError: a part has no name in the unmodified model, or the sizes do not add up.
    """
    if type(dim) is not int or not -parameter.dim() <= dim < parameter.dim():
        raise ScheduleError(f"dim is {dim!r}; give a dimension of a parameter that has {parameter.dim()}")
    dim, held, size = dim % parameter.dim(), [], 0
    for part in parts:
        tensor, start, stop = part if isinstance(part, tuple) else (part, 0, part.shape[dim])
        if not (names := parameter_facts(tensor).names):
            raise ScheduleError("a part has no name in the unmodified model; give parameters of the scheduled one")
        if tensor.dim() != parameter.dim() or not 0 <= start < stop <= tensor.shape[dim]:
            raise ScheduleError(
                f"{names[0]!r} of shape {tuple(tensor.shape)} has no range {start} to {stop} along dimension {dim}"
            )
        held.append((names[0], (start, stop), tensor.shape[dim]))
        size += stop - start
    if size > parameter.shape[dim] or (size < parameter.shape[dim] and not padded):
        raise ScheduleError(f"parts of {size} along dimension {dim} do not make up a parameter of {parameter.shape[dim]}")
    parameter_facts(parameter)  # makes the facts now, so that a copy of the parameter has them
    setattr(parameter, _ATTRIBUTE, FusedParts(dim, tuple(held), parameter.shape[dim] if padded else None))
    return parameter


def fused_parts(tensor: torch.Tensor) -> FusedParts | None:
    """Return the declared parts, or None. Packages that do not depend on this one set the attribute to a plain tuple."""
    found = getattr(tensor, _ATTRIBUTE, None)
    return None if found is None else FusedParts(*found)


def view_of(made: FusedParts, views: Mapping[str, TensorView]) -> TensorView:
    """Return the view of a fused parameter; raise ``ValueError`` if the views of its parts differ in dtype or shape."""
    view = concatenate([views[name].narrow(made.dim, *span) for name, span, _ in made.parts], made.dim)
    return view if made.padded is None else view.pad(made.padded, made.dim)
