"""Rule for Embedding, and for subclasses that multiply what they look up by a number, such as Gemma's and BART's.

A numeric probe finds these subclasses. Their forward may only look up, multiply, and convert: its result is then linear in the
weight, and a constant times the plain rows for random numbers is so for all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .sharding_rule import Cut, ShardingRule, applied_cut, computes_as, split_of

_LINEAR = {
    *(F.embedding, torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__),
    *(torch.Tensor.to, torch.Tensor.type_as, *(getattr(torch.Tensor, name).__get__ for name in ("dtype", "device"))),
}
_known: WeakKeyDictionary[type[nn.Module], dict[frozenset[str], bool]] = WeakKeyDictionary()


def is_embedding(module: nn.Module) -> bool:
    """Return whether a module is an Embedding, or a subclass that multiplies its rows by a constant."""
    if not isinstance(module, nn.Embedding) or computes_as(module, nn.Embedding):
        return isinstance(module, nn.Embedding)
    buffers = frozenset(module._buffers)
    is_plain = {*module._parameters} == {"weight"} and not module._modules
    if not is_plain or any(each is None or each.numel() != 1 for each in module._buffers.values()):
        return False
    known = _known.setdefault(type(module), {})
    if buffers not in known:
        known[buffers] = _scales_rows(module)
    return known[buffers]


def _scales_rows(module: nn.Embedding) -> bool:
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        weight, others = (torch.randn(size, 3, generator=generator, dtype=torch.float64, device="cpu") for size in (5, 4))
        return all(_agrees(module, weight.requires_grad_(), others, training) for training in (True, False))


def _agrees(module: nn.Embedding, weight: torch.Tensor, others: torch.Tensor, training: bool) -> bool:
    ids = torch.tensor([[0, 3], [4, 1]], device="cpu")
    numbers = {name: torch.tensor(0.7, dtype=torch.float64, device="cpu") for name in module._buffers}
    state = {"_parameters": {"weight": weight}, "_buffers": numbers, "training": training}
    try:
        with _LinearOnly():
            found = _with_attributes(module, padding_idx=None, **state)(ids)
        rows = F.embedding(ids, weight)
        expected = rows * (found.flatten()[0] / rows.flatten()[0]).detach()
        values = [[of, *torch.autograd.grad((of * others.view_as(of)).sum(), weight)] for of in (found, expected)]
        return all(one.shape == other.shape and torch.allclose(one, other) for one, other in zip(*values, strict=True))
    except Exception:  # an unknown forward may raise anything without the rest of its module
        return False


class _LinearOnly(TorchFunctionMode):
    """Mode that refuses functions other than lookups, products and conversions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _LINEAR:
            raise TypeError(f"{func} is not linear")
        return func(*args, **(kwargs or {}))


def _with_attributes(module: nn.Module, **attributes: Any) -> Callable[..., torch.Tensor]:
    """Return the forward of the module's class with other values of some attributes; the module does not change."""
    other = object.__new__(type(module))
    other.__dict__.update({**module.__dict__, **attributes})
    return partial(type(module).forward, other)


def vocabulary_lookup(module: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward of a vocabulary-parallel Embedding: rows that this rank owns, and zeros for rows of other ranks.

    An index outside the whole vocabulary stays outside, so that it fails on every rank as in the unmodified module.
    """
    (input,) = (*args, *kwargs.values())
    applied = applied_cut(module)
    assert applied is not None
    spec = applied.spec
    ((start, stop),) = spec.ranges()
    owned = (input >= start) & (input < stop)
    elsewhere = ~owned & (input >= 0) & (input < spec.full_shape[0])
    padding = module.padding_idx
    local_padding = padding - start if padding is not None and start <= padding < stop else None
    local = (input - start).masked_fill(elsewhere, 0)
    if computes_as(module, nn.Embedding):
        rows = F.embedding(local, module.weight, local_padding)
    else:
        rows = _with_attributes(module, padding_idx=local_padding)(local)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


def with_global_ids(module: nn.Module, given: tuple[Any, ...], found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the result of a function before the module, with local ids replaced by global ones.

    The classic function masks the ids of other ranks and counts its own from 0. The sharded embedding takes global ids, and
    returns zeros for the ids of other ranks.
    """
    applied = split_of(module)
    if applied is None or (applied.cut.input, applied.cut.output) != ("indices", "partial") or not (given and found):
        return found
    before, after = given[0], found[0]
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)) or before.shape != after.shape:
        return found
    ((start, stop),) = applied.spec.ranges()
    owned = (before >= start) & (before < stop)
    is_local = start > 0 and bool(owned.any()) and torch.equal(after[owned], before[owned] - start)
    return (after + start, *found[1:]) if is_local else found


def _refuse_embedding(module: nn.Module, cut: Cut) -> str | None:
    if module.sparse:
        return "sparse gradients cannot be sharded; use sparse=False"
    if module.max_norm is not None:
        return f"max_norm={module.max_norm} rescales whole rows in place; use max_norm=None"
    if module.scale_grad_by_freq and cut.dims["weight"] == 0:
        return "scale_grad_by_freq counts indices of other ranks; use scale_grad_by_freq=False or axis 1"
    return None


EMBEDDING = ShardingRule(
    "Embedding",
    is_embedding,
    (
        Cut({"weight": 0}, "indices", "partial", ("num_embeddings",), vocabulary_lookup, fusable=False, uneven=True),
        Cut({"weight": 1}, "indices", "sharded", ("embedding_dim",), uneven=True),
    ),
    _refuse_embedding,
)
