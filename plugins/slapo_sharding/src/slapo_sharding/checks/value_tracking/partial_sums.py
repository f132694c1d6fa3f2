"""Numeric probe for functions of partial values, before the reduction.

A row-parallel layer without its own sync returns a partial value, and a module around it reduces its output. A function in
between must be linear in the partial value: scaling and reshaping are, a ``relu`` or a norm is not. A replicated bias or
residual would be added once for each rank. Torch's rules would reduce at once, so only the probe decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Partial

from slapo_core import rng_state

from .numeric_probe import MixesShards, generator_states, is_continuous, random_like
from .tracked_value import Layout, tensors_in

if TYPE_CHECKING:
    from .op_rules import OpCall

_DRAWS = 3  # a single element may have the sign that relu keeps
REDUCE = "give sync('fwd_post', 'all_reduce') to that layer itself"
"""Remedy for a partial value that must be reduced earlier."""


def partial_value(x: torch.Tensor, ranks: int) -> Layout:
    """Return the layout of a value that is partial over ``ranks`` ranks."""
    return Layout(x.shape, x.stride(), x.dtype, x.device, Partial(), ranks, (tuple(x.shape), x.stride()))


def probe_partial(call: OpCall, numbers: Mapping[int, torch.Tensor], same: str) -> Sequence[Layout | str]:
    """Return the layout of each result of a torch function of partial values, or ``same`` for a replicated one.

    The result is empty if no probe is possible. ``numbers`` are the untracked arguments by index. Raises ``MixesShards`` if the
    results of the partial values do not add up to the result of the sum.
    """
    layouts = [leaf for leaf in call.leaves if isinstance(leaf, Layout) and leaf.placement is not None]
    if "c10d" in str(call.func):  # the model's own collective may be the reduction
        return ()
    if not all(layout.placement.is_partial() and is_continuous(layout) for layout in layouts):  # type: ignore[union-attr]
        return ()
    generator, cases = torch.Generator().manual_seed(0), []
    for _ in range(_DRAWS):
        results = _results(call, _arguments(call, numbers, generator))
        if len({len(found) for found in results}) != 1:
            return ()
        cases.append([(whole, parts) for whole, *parts in zip(*results, strict=True)])
    found: list[Layout | str] = []
    for draws in zip(*cases, strict=True):
        if all(_is_near(whole, part) for whole, parts in draws for part in parts):
            found.append(same)
        elif all(is_continuous(whole) and _is_near(whole, sum(parts)) for whole, parts in draws):
            found.append(partial_value(draws[0][0], call.of.ranks))
        else:
            raise MixesShards(
                f"what {call.name} makes of the parts of a sum does not add up to what it makes of the sum", REDUCE
            )
    return found


def _arguments(call: OpCall, numbers: Mapping[int, torch.Tensor], generator: torch.Generator) -> list[list[Any]]:
    """Return random arguments of the sum, then of each rank; weights are random too, because they may still be zero."""
    everyone = [list(call.leaves) for _ in range(1 + call.of.ranks)]
    for place, leaf in enumerate(call.leaves):
        if place in numbers:
            own = _in_float32(numbers[place].detach())
            drawn = _in_float32(random_like(leaf, 0.5, generator)).to(own.device) if numbers[place].requires_grad else own
            given = [drawn.clone() for _ in everyone]
        elif isinstance(leaf, Layout):
            parts = [_in_float32(random_like(leaf, 0.5, generator)).to(leaf.device) for _ in everyone[1:]]
            given = [torch.stack(parts).sum(0), *parts]
        else:
            continue
        for leaves, tensor in zip(everyone, given, strict=True):
            leaves[place] = tensor
    return everyone


def _results(call: OpCall, arguments: list[list[Any]]) -> list[list[torch.Tensor]]:
    """Return the results of each call, with equal random draws; empty if one fails. Inside ``fork_rng``, a draw is an error."""
    devices = {call.of.device} if call.of.device.type == "cuda" else set()
    results, drawn = [], False
    try:
        for leaves in arguments:
            with torch.random.fork_rng(devices=devices):
                before = generator_states(devices)
                results.append(list(tensors_in(call.run(leaves))))
                drawn = not all(map(torch.equal, before, generator_states(devices)))
    except Exception:  # a local size may not fit, and operators may raise anything
        return []
    if drawn and rng_state().forks:
        raise MixesShards(f"{call.name} draws other random numbers on each rank for the parts of a sum", REDUCE)
    return results


def _in_float32(x: torch.Tensor) -> torch.Tensor:
    """Return a lower-precision tensor in float32, so that small values are not lost in rounding."""
    return x.float() if x.is_floating_point() and x.element_size() < 4 else x


def _is_near(whole: torch.Tensor, other: Any) -> bool:
    """Return whether two results are equal up to rounding of the largest values that were added."""
    if whole.shape != other.shape or not is_continuous(whole):
        return whole.shape == other.shape and torch.equal(whole, other)
    scale = max(1.0, float(whole.abs().nan_to_num(0, 0, 0).max())) if whole.numel() else 1.0
    near = scale * max(1e-4, 8 * torch.finfo(whole.dtype).eps)
    return torch.allclose(whole.to(torch.complex128), other.to(torch.complex128), rtol=0, atol=near, equal_nan=True)
