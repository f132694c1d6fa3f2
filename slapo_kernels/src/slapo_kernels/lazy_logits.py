"""Logits that are not computed until somebody looks at them: a cross entropy does not have to.

They are tensors like others, with gradients; what is computed from them is computed from the real ones, made once. But casts,
views and slices that keep the last dimension whole stay lazy, and of such the cross entropy is the kernel's, which takes the
hidden states and the weight of the head. Once some are computed, those they are views of, and all views of these, are too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from slapo_core.wrapping import is_opaque

from .registry import run


@dataclass(frozen=True)
class LazyHead:
    """What a head computes that is followed by a cross entropy.

    Args:
        inputs: Name of the forward's argument.
        choice: Implementation that a user has chosen.
    """

    inputs: tuple[str, ...] = ("input",)
    choice: str | None = None
    kernels: ClassVar[tuple[str, ...]] = ("linear_cross_entropy",)

    @property
    def forced(self) -> bool:
        """Whether a user has chosen an implementation; a compiler sees none."""
        return False

    def fits(self, module: Any, args: tuple[Any, ...]) -> bool:
        """With gradients, and where nobody looks at once."""
        (x,) = args
        return torch.is_grad_enabled() and type(x) is torch.Tensor and x.dim() > 1 and not is_opaque(module)

    def __call__(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """Lazy logits."""
        weight, bias, kind = module.weight, module.bias, x.device.type
        if torch.is_autocast_enabled(kind):  # the loss may be computed outside of it
            dtype = torch.get_autocast_dtype(kind)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return _lazy(x, weight, bias, x.dtype, self.choice)


def find_heads(root: nn.Module) -> dict[str, nn.Module]:
    """The heads of models of Transformers from ``root`` down, which say what theirs is, or ``root`` if it is a Linear."""
    heads = [root] if isinstance(root, nn.Linear) else []
    for module in root.modules():
        ask = getattr(module, "get_output_embeddings", None)
        heads += [ask()] if callable(ask) else []
    ids = {id(head) for head in heads if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward}
    return {path: module for path, module in root.named_modules() if id(module) in ids}


class LazyLogits(torch.Tensor):
    """``hidden @ weight.T + bias``, in a dtype; or a view ``of`` others."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    choice: str | None
    numbers: torch.Tensor | None
    of: tuple[LazyLogits, Callable[[torch.Tensor], torch.Tensor]] | None

    @staticmethod
    def __new__(
        cls, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, choice: str | None
    ) -> LazyLogits:
        """Nothing is computed."""
        shape = (*hidden.shape[:-1], len(weight))
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        made.hidden, made.weight, made.bias, made.choice, made.numbers = hidden, weight, bias, choice, None
        made.of = None
        return made

    @property
    def is_lazy(self) -> bool:
        """Whether there are no numbers yet."""
        return self.numbers is None and (self.of is None or self.of[0].is_lazy)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.detach())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _IN_PLACE or (name.endswith("_") and name[:2] != "__" and name != "requires_grad_"):
            raise _changed(name)
        stays = _LAZY.get(func)
        if stays is not None and isinstance(args[0] if args else None, LazyLogits) and args[0].is_lazy:
            found = stays(*args, **kwargs)
            if found is not None:
                return found
        with torch._C.DisableTorchFunctionSubclass():
            return func(*pytree.tree_map_only(LazyLogits, torch.Tensor.detach, args) if func in _READ else args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            raise _changed(str(func))
        return func(*pytree.tree_map_only(LazyLogits, _real, args), **pytree.tree_map_only(LazyLogits, _real, kwargs or {}))


class _Head(torch.autograd.Function):
    """Lazy logits as autograd sees them: the gradients of a linear layer."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, choice: str | None
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return LazyLogits(hidden.detach(), weight.detach(), None if bias is None else bias.detach(), dtype, choice)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        grad = grad.to(hidden.dtype)
        rows = grad.flatten(0, -2)
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_weight = rows.t() @ hidden.flatten(0, -2) if needs_weight else None
        return grad @ weight if needs_hidden else None, of_weight, rows.sum(0) if needs_bias else None, None, None


def _lazy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, choice: str | None
) -> torch.Tensor:
    made: Any = _Head.apply(hidden, weight, bias, dtype, choice)  # type: ignore[no-untyped-call]
    made.hidden, made.weight, made.bias = hidden, weight, bias  # with their history: the kernel has gradients of its own
    return made  # type: ignore[no-any-return]


def _real(logits: LazyLogits) -> torch.Tensor:
    """The numbers; gradients are autograd's business, above."""
    if logits.of is not None:
        with torch.no_grad():
            return logits.of[1](_real(logits.of[0]))
    if logits.numbers is None:
        with torch.no_grad(), torch.autocast(logits.hidden.device.type, enabled=False):
            logits.numbers = F.linear(logits.hidden, logits.weight, logits.bias).to(logits.dtype)
    return logits.numbers


# -- what stays lazy; None where it does not


def _other(
    logits: LazyLogits,
    hidden: Callable[[torch.Tensor], torch.Tensor],
    own: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The logits of other hidden states: what is done to these, and to logits, if it is not the same."""
    made: Any = _lazy(hidden(logits.hidden), logits.weight, logits.bias, logits.dtype, logits.choice)
    made.of = logits, own or hidden
    return made  # type: ignore[no-any-return]


def _changed(name: str) -> RuntimeError:
    what = f"{name} changes logits in place that use_kernels('linear_cross_entropy') has left to be computed"
    return RuntimeError(f"{what}; change a clone()")


def _to(logits: LazyLogits, *args: Any, dtype: Any = None, device: Any = None, **others: Any) -> torch.Tensor | None:
    for arg in args:
        dtype, device = (arg, device) if isinstance(arg, torch.dtype) else (dtype, arg)
    same = device is None or (isinstance(device, (str, torch.device)) and torch.device(device) == logits.device)
    if others or not same or not (dtype is None or dtype.is_floating_point):
        return None
    if dtype in (None, logits.dtype):
        return logits
    made: Any = _lazy(logits.hidden, logits.weight, logits.bias, dtype, logits.choice)
    made.of = logits, lambda numbers: numbers.to(dtype)
    return made  # type: ignore[no-any-return]


def _view(logits: LazyLogits, *shape: Any) -> torch.Tensor | None:
    if len(shape) == 1 and isinstance(shape[0], Sequence):
        shape = tuple(shape[0])
    if not shape or not all(isinstance(size, int) for size in shape):
        return None
    *batch, last = shape
    if last == -1:
        last = logits.numel() // (math.prod(batch) or 1)
    if last != logits.shape[-1] or (-1 not in batch and math.prod(batch) != math.prod(logits.shape[:-1])):
        return None
    return _other(logits, lambda values: values.reshape(*batch, values.shape[-1]))


def _flatten(logits: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> torch.Tensor | None:
    start, end = start_dim % logits.dim(), end_dim % logits.dim()
    return _other(logits, lambda hidden: hidden.flatten(start, end)) if end < logits.dim() - 1 else None


def _getitem(logits: LazyLogits, index: Any) -> torch.Tensor | None:
    parts = list(index) if isinstance(index, tuple) else [index]
    if (
        len(parts) == 1
        and isinstance(parts[0], torch.Tensor)
        and parts[0].dtype is torch.bool
        and parts[0].dim() < logits.dim()
    ):
        return _other(logits, lambda hidden: hidden[index])
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts) or parts.count(Ellipsis) > 1:
        return None
    given = [part for part in parts if part is not Ellipsis]
    reaches = len(given) == logits.dim() or (Ellipsis in parts and parts[-1] is not Ellipsis)
    if reaches and parts[-1] != slice(None):
        return None
    return _other(logits, lambda hidden: hidden[index])


def _cross_entropy(
    logits: LazyLogits,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    plain = type(target) is torch.Tensor and target.dtype is torch.long and logits.dim() == 2 and target.dim() == 1
    if not plain or weight is not None or size_average is not None or reduce is not None or label_smoothing:
        return None
    loss: torch.Tensor = run(
        "linear_cross_entropy",
        logits.hidden,
        logits.weight,
        target,
        choice=logits.choice,
        bias=logits.bias,
        ignore_index=ignore_index,
        reduction=reduction,
    )
    return loss.to(logits.dtype)


_IN_PLACE = frozenset(f"__{name}__" for name in "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split())
_READ = (torch.Tensor.tolist, torch.Tensor.__reduce_ex__, torch.Tensor.__array__)
"""What torch does not do with tensors of other classes: of their numbers it does."""
_LAZY: dict[Any, Callable[..., torch.Tensor | None]] = {
    F.cross_entropy: _cross_entropy,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.contiguous: lambda logits: logits,
    torch.Tensor.flatten: _flatten,
    torch.Tensor.float: lambda logits: _to(logits, torch.float32),
    torch.Tensor.reshape: _view,
    torch.Tensor.to: _to,
    torch.Tensor.view: _view,
    torch.flatten: _flatten,
    torch.reshape: _view,
}
