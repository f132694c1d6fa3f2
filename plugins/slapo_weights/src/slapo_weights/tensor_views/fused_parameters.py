"""What a parameter that a step brought in is made of: the name map by which weights find it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from slapo_core import ScheduleError, parameter_facts

from .box_view import View, concatenated

_ATTRIBUTE = "slapo_made_of"


class MadeOf(NamedTuple):
    """How a tensor is put together.

    Args:
        dim: Its parts lie one behind the other along this dimension.
        parts: Of each the name in the unmodified model, the range of it along ``dim``, and its whole size along that.
        padded: The size along ``dim`` with the zeros behind the last part; None where there are none.
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
    """Declare that a new parameter consists of some of the unmodified model's, or ranges of them.

    A primitive calls it for what it puts in, so that weights are loaded into it. It stays with the parameter when that is
    sharded, replaced or copied.

    Args:
        parameter: The new one, whole.
        parts: The old ones in order, each with ``start, stop`` along ``dim`` where not all of it is meant.
        dim: Along which they lie one behind the other; counted from the end where it is negative.
        padded: Whether the parameter goes on behind the last part, as that of a vocabulary with more rows than tokens. What is
            there is 0 when it is loaded, and is not exported.

    Returns:
        ``parameter``.

    Raises:
        ScheduleError: a part is itself of no name in the unmodified model, or they do not add up.
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
    parameter_facts(parameter)  # it is copied with what else is known
    setattr(parameter, _ATTRIBUTE, MadeOf(dim, tuple(held), parameter.shape[dim] if padded else None))
    return parameter


def parts_of(tensor: torch.Tensor) -> MadeOf | None:
    """What was declared of it; a package that does not depend on this one sets the attribute to a plain tuple."""
    found = getattr(tensor, _ATTRIBUTE, None)
    return None if found is None else MadeOf(*found)


def view_of(made: MadeOf, views: Mapping[str, View]) -> View:
    """What it is, of what files hold.

    Raises:
        ValueError: the parts do not go together.
    """
    view = concatenated([views[name].narrow(made.dim, *span) for name, span, _ in made.parts], made.dim)
    return view if made.padded is None else view.padded(made.padded, made.dim)
