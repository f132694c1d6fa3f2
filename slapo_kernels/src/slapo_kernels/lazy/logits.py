"""Lazy logits: a tensor subclass that computes its values on first use, which a cross entropy does not need.

Operations compute the values once and use them. Casts, views and slices that keep the last dimension whole stay lazy, and the
cross entropy of lazy logits is the kernel's, which takes the hidden states and the weight of the head. Computing a view
computes its base, and with it all other views. Until then, hidden states and weight must not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from slapo_tracing.nodes import is_opaque

from ..implementations._torch_private import is_fsdp_hook, is_transformed
from .cross_entropy import CrossEntropyOptions, GradientObservers, LazyCrossEntropy, dtype_of_loss, is_labels
from .head_inputs import HeadInputs, LazyLogitsError, MutationCheck


@dataclass(frozen=True)
class LazyHead:
    """Forward of a language-model head that returns lazy logits; its attributes are those of a ``KernelForward``."""

    inputs: tuple[str, ...] = ("input",)
    choice: str | None = None
    kernels: ClassVar[tuple[str, ...]] = ("linear_cross_entropy",)
    method: ClassVar[str] = "forward"

    @property
    def is_forced(self) -> bool:
        """False: under ``torch.compile`` the head's own forward runs in any case."""
        return False

    def admits(self, module: Any, args: tuple[Any, ...]) -> bool:
        """Return whether the call has plain tensors of fitting dtypes, gradients, and no hook that would read the result."""
        (x,) = args
        tensors = [x, module.weight, *([] if module.bias is None else [module.bias])]
        plain = all(type(each) in (torch.Tensor, nn.Parameter) and each.device == x.device for each in tensors)
        if not plain or x.is_meta or not torch.is_grad_enabled() or is_transformed() or is_opaque(module):
            return False
        dtypes = {each.dtype for each in tensors}
        alike = len(dtypes) == 1 and x.is_floating_point()
        cast = torch.is_autocast_enabled(x.device.type) and dtypes <= _CAST
        return (alike or cast) and x.dim() > 1 and x.shape[-1] == module.weight.shape[-1]

    def __call__(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        weight, bias, kind = module.weight, module.bias, x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype in _CAST:  # the loss may be computed outside the autocast region
            dtype = torch.get_autocast_dtype(kind)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        mutation_check = MutationCheck({"the hidden states": x, "the head's weight": weight, "the head's bias": bias})
        source = HeadInputs(x, weight, bias, self.choice, mutation_check)
        logits: torch.Tensor = _Head.apply(x, weight, bias, source, x.dtype)  # type: ignore[no-untyped-call]
        return logits


class LazyLogits(torch.Tensor):
    """``hidden @ weight.T + bias`` in a dtype, not yet computed; or a view of ``base_view[0]``."""

    source: HeadInputs
    observers: GradientObservers
    materialized: torch.Tensor | None
    base_view: tuple[LazyLogits, Callable[[torch.Tensor], torch.Tensor]] | None

    @staticmethod
    def __new__(
        cls, source: HeadInputs, dtype: torch.dtype, of: tuple[LazyLogits, Callable[[torch.Tensor], torch.Tensor]] | None = None
    ) -> LazyLogits:
        """Make a wrapper tensor of the logits' shape, without computing values."""
        hidden = source.hidden
        shape = (*hidden.shape[:-1], len(source.weight))
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        made.source, made.base_view, made.materialized = source, of, None
        made.observers = GradientObservers(of[0].observers if of else None)
        return made

    @property
    def is_lazy(self) -> bool:
        """True until the values are computed."""
        return self.materialized is None and (self.base_view is None or self.base_view[0].is_lazy)

    def view_of(self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the lazy view of these logits that ``change`` makes; it is the logits of the changed hidden states."""
        source = replace(self.source, hidden=change(self.source.hidden))
        made: torch.Tensor = _View.apply(self, source, change, dtype or self.dtype)  # type: ignore[no-untyped-call]
        return made

    def materialize(self) -> torch.Tensor:
        """Return the values, without gradients: these are those of ``_Head`` and ``_View``."""
        with torch.inference_mode(False), torch.no_grad():
            if self.base_view is not None:
                return self.base_view[1](self.base_view[0].materialize()).to(self.dtype)
            if self.materialized is None:
                source = self.source.validate()
                with torch.autocast(self.device.type, enabled=False):
                    self.materialized = F.linear(source.hidden, source.weight, source.bias).to(self.dtype)
            return self.materialized

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.detach())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        in_place = name in _IN_PLACE or (name.endswith("_") and name[:2] != "__" and name != "requires_grad_")
        if (in_place or func == _SET_DATA) and isinstance(first, LazyLogits):
            raise _mutation_error(name)
        if isinstance(first, LazyLogits):
            # FSDP hooks the logits for a gradient that the loss, which it hooks as well, brings
            if func in _GRADIENT_OBSERVERS and not (first.observers.has_loss and is_fsdp_hook(args[-1])):
                first.observers.has_observer = True
            if func in _LAZY_FUNCTIONS and first.is_lazy and (found := _LAZY_FUNCTIONS[func](*args, **kwargs)) is not None:
                return found
            if func == _DATA:
                return first.detach()
        with torch._C.DisableTorchFunctionSubclass():
            if func in _DATA_READERS:
                args = pytree.tree_map_only(LazyLogits, lambda one: one.detach().requires_grad_(one.requires_grad), args)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        written = [
            value for value, of in zip(args, func._schema.arguments, strict=False) if of.alias_info and of.alias_info.is_write
        ]
        if any(isinstance(value, LazyLogits) for value in [*written, (kwargs or {}).get("out")]):
            raise _mutation_error(str(func))
        args, kwargs = pytree.tree_map_only(LazyLogits, LazyLogits.materialize, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Head(torch.autograd.Function):
    """Autograd node of lazy logits: the backward of a linear layer."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, source: HeadInputs, dtype: torch.dtype
    ) -> torch.Tensor:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        ctx.dtype = hidden.dtype
        ctx.save_for_backward(hidden if needs_weight else None, weight if needs_hidden else None)
        return LazyLogits(source, dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        hidden, weight = ctx.saved_tensors
        grad = grad.to(ctx.dtype)
        rows = grad.flatten(0, -2)
        of_hidden = None if weight is None else grad @ weight
        of_weight = None if hidden is None else rows.t() @ hidden.flatten(0, -2)
        return of_hidden, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None


class _View(torch.autograd.Function):
    """Autograd node of a lazy view: the backward of the view and of its cast."""

    @staticmethod
    def forward(
        ctx: Any, logits: LazyLogits, source: HeadInputs, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dtype, ctx.change = logits.shape, logits.dtype, change
        return LazyLogits(source, dtype, (logits, change))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return (None,) * 4
        with torch.enable_grad():
            blank = torch.zeros((), dtype=ctx.dtype, device=grad.device).expand(ctx.shape).requires_grad_()
            made = ctx.change(blank)
        (found,) = torch.autograd.grad(made, blank, grad.to(ctx.dtype), create_graph=torch.is_grad_enabled())
        return found, None, None, None


def _mutation_error(name: str) -> LazyLogitsError:
    what = f"{name} changes logits in place that use_kernels('linear_cross_entropy') has left to be computed"
    return LazyLogitsError(f"{what}; change a clone()")


_CAST = {torch.float32, torch.bfloat16, torch.float16}
"""Dtypes that autocast casts."""
_IN_PLACE = frozenset(f"__{name}__" for name in "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split())
_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_DATA_READERS = tuple(
    getattr(torch.Tensor, name)
    for name in "__array__ __dlpack__ __reduce_ex__ data_ptr numpy storage tolist untyped_storage".split()
)
"""Functions that need storage, which a wrapper tensor lacks: they get the computed values."""
_GRADIENT_OBSERVERS = (torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.Tensor.grad_fn.__get__)  # type: ignore[union-attr]
"""Functions by which users observe gradients of the logits; from then on the loss's gradient goes through the logits."""


_Found = torch.Tensor | None
"""Result of a lazy version; None if it cannot be lazy: torch's function then runs on the values and raises its own errors."""


def _to(logits: LazyLogits, *args: Any, dtype: Any = None, device: Any = None, **others: Any) -> _Found:
    for arg in args:
        dtype, device = (arg, device) if isinstance(arg, torch.dtype) else (dtype, arg)
    same = device is None or (isinstance(device, (str, torch.device)) and torch.device(device) == logits.device)
    if others or not same or not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        return None
    return logits if dtype in (None, logits.dtype) else _lazy_view(logits, lambda values: values, dtype)


def _view(logits: LazyLogits, *shape: Any, **others: Any) -> _Found:
    if len(shape) == 1 and isinstance(shape[0], Sequence):
        shape = tuple(shape[0])
    if others or not shape or not all(type(size) is int for size in shape):
        return None
    *batch, last = shape
    if last == -1:
        last = logits.numel() // (math.prod(batch) or 1)
    if last != logits.shape[-1] or (-1 not in batch and math.prod(batch) != math.prod(logits.shape[:-1])):
        return None
    return _lazy_view(logits, lambda values: values.reshape(*batch, values.shape[-1]))


def _flatten(logits: LazyLogits, start_dim: Any = 0, end_dim: Any = -1) -> _Found:
    dims = range(-logits.dim(), logits.dim())
    if not (type(start_dim) is type(end_dim) is int and start_dim in dims and end_dim in dims):
        return None
    start, end = start_dim % logits.dim(), end_dim % logits.dim()
    return _lazy_view(logits, lambda values: values.flatten(start, end)) if end < logits.dim() - 1 else None


def _getitem(logits: LazyLogits, index: Any) -> _Found:
    parts = list(index) if isinstance(index, tuple) else [index]
    (first, *others) = parts or [None]
    if isinstance(first, torch.Tensor) and not others and first.dtype is torch.bool and 0 < first.dim() < logits.dim():
        return _lazy_view(logits, lambda values: values[index])
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts) or parts.count(Ellipsis) > 1:
        return None
    given = [part for part in parts if part is not Ellipsis]
    reaches = len(given) == logits.dim() or (Ellipsis in parts and parts[-1] is not Ellipsis)
    if reaches and parts[-1] != slice(None):
        return None
    return _lazy_view(logits, lambda values: values[index])


def _lazy_view(logits: LazyLogits, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None) -> _Found:
    if logits.requires_grad and not torch.is_grad_enabled():  # a view under no_grad would keep its autograd history
        return None
    try:
        return logits.view_of(change, dtype)
    except (RuntimeError, IndexError, TypeError, ValueError):  # the error would name hidden states, not logits
        return None


def _cross_entropy(
    logits: LazyLogits,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: Any = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: Any = 0.0,
) -> _Found:
    if weight is not None or size_average is not None or reduce is not None or label_smoothing or logits.observers:
        return None
    known = type(ignore_index) is int and reduction in ("mean", "sum", "none")
    if not known or not is_labels(target, logits, ignore_index):
        return None
    source = logits.source.validate()
    logits.observers.record_loss()
    tensors = [source.hidden, source.weight, source.bias]
    if not logits.requires_grad:  # a view that was made without gradients
        tensors = [each if each is None else each.detach() for each in tensors]
    loss = CrossEntropyOptions(source.choice, ignore_index, reduction, dtype_of_loss(logits), logits.dtype)
    found: torch.Tensor = LazyCrossEntropy.apply(*tensors, logits, target, loss, logits.observers)  # type: ignore[no-untyped-call]
    return found


_LAZY_FUNCTIONS: dict[Any, Callable[..., _Found]] = {
    F.cross_entropy: _cross_entropy,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.contiguous: lambda logits, **others: None if others else logits,
    torch.Tensor.flatten: _flatten,
    torch.Tensor.float: lambda logits, **others: _to(logits, torch.float32, **others),
    torch.Tensor.reshape: _view,
    torch.Tensor.to: _to,
    torch.Tensor.view: _view,
    torch.flatten: _flatten,
    torch.reshape: _view,
}
"""Torch function to its lazy version."""
