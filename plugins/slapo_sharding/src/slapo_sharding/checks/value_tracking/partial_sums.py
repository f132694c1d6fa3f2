"""What may be done to parts of a sum before they are added up: random numbers decide, as torch's rules add up at once.

A row-parallel layer without a sync of its own returns such parts, and a module around it reduces what it returns. Between the
two a function has to give parts of the sum's result: to scale and to reshape does, a ``relu`` or a norm does not, and what is
whole on every rank, a bias or a residual, is added once for each of them.
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

_DRAWS = 3  # one number alone may have the sign that relu keeps
REDUCE = "give sync('fwd_post', 'all_reduce') to that layer itself"
"""The remedy where parts of a sum do not do."""


def partial_value(x: torch.Tensor, ranks: int) -> Layout:
    """Of a value whose sum over so many ranks is meant."""
    return Layout(x.shape, x.stride(), x.dtype, x.device, Partial(), ranks, (tuple(x.shape), x.stride()))


def probe_partial(question: OpCall, numbers: Mapping[int, torch.Tensor], same: str) -> Sequence[Layout | str]:
    """What a torch function makes of parts of a sum.

    Args:
        question: The call of one rank.
        numbers: Place to tensor, of the arguments that are not followed.
        same: What stands for a result that is the same on every rank.

    Returns:
        For each result its layout, or ``same``; empty where it cannot be tried.

    Raises:
        Mixed: the results of the parts do not add up to that of the sum.
    """
    layouts = [leaf for leaf in question.leaves if isinstance(leaf, Layout) and leaf.placement is not None]
    if "c10d" in str(question.func):  # a collective of the model's own may be what adds them up
        return ()
    if not all(layout.placement.is_partial() and is_continuous(layout) for layout in layouts):  # type: ignore[union-attr]
        return ()
    generator, cases = torch.Generator().manual_seed(0), []
    for _ in range(_DRAWS):
        results = _results(question, _arguments(question, numbers, generator))
        if len({len(found) for found in results}) != 1:
            return ()
        cases.append([(whole, parts) for whole, *parts in zip(*results, strict=True)])
    found: list[Layout | str] = []
    for draws in zip(*cases, strict=True):
        if all(_near(whole, part) for whole, parts in draws for part in parts):
            found.append(same)
        elif all(is_continuous(whole) and _near(whole, sum(parts)) for whole, parts in draws):
            found.append(partial_value(draws[0][0], question.of.ranks))
        else:
            raise MixesShards(
                f"what {question.name} makes of the parts of a sum does not add up to what it makes of the sum", REDUCE
            )
    return found


def _arguments(question: OpCall, numbers: Mapping[int, torch.Tensor], generator: torch.Generator) -> list[list[Any]]:
    """Those of the sum, then those of each rank; weights may be zero as yet, so they are drawn, too."""
    everyone = [list(question.leaves) for _ in range(1 + question.of.ranks)]
    for place, leaf in enumerate(question.leaves):
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


def _results(question: OpCall, arguments: list[list[Any]]) -> list[list[torch.Tensor]]:
    """The tensors that each call returns; empty where one fails. All draw the same random numbers, as ranks do that are alike.

    Raises:
        Mixed: it draws, and ranks draw other numbers each.
    """
    devices = {question.of.device} if question.of.device.type == "cuda" else set()
    results, drawn = [], False
    try:
        for leaves in arguments:
            with torch.random.fork_rng(devices=devices):
                before = generator_states(devices)
                results.append(list(tensors_in(question.run(leaves))))
                drawn = not all(map(torch.equal, before, generator_states(devices)))
    except Exception:  # sizes, operators of any kind
        return []
    if drawn and rng_state().forks:
        raise MixesShards(f"{question.name} draws other random numbers on each rank for the parts of a sum", REDUCE)
    return results


def _in_float32(x: torch.Tensor) -> torch.Tensor:
    """In single precision, what has less: a small number must not be lost in rounding."""
    return x.float() if x.is_floating_point() and x.element_size() < 4 else x


def _near(whole: torch.Tensor, other: Any) -> bool:
    """Whether they are the same but for rounding, which is that of the largest numbers that were added."""
    if whole.shape != other.shape or not is_continuous(whole):
        return whole.shape == other.shape and torch.equal(whole, other)
    scale = max(1.0, float(whole.abs().nan_to_num(0, 0, 0).max())) if whole.numel() else 1.0
    near = scale * max(1e-4, 8 * torch.finfo(whole.dtype).eps)
    return torch.allclose(whole.to(torch.complex128), other.to(torch.complex128), rtol=0, atol=near, equal_nan=True)
