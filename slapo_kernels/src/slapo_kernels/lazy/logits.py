"""Lazy logits: a tensor subclass that computes its values on first use, which a cross entropy does not need.

Operations compute the values once and use them. Casts, views and slices that keep the last dimension whole stay lazy, and the
cross entropy of lazy logits is the kernel's, which takes the hidden states and the weight of the head. Computing a view
computes its base, and with it all other views. Until then, hidden states and weight must not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from slapo_core import SlapoError
from slapo_tracing.nodes import is_opaque

from ..implementations._torch_private import is_fsdp_hook, is_transformed
from .cross_entropy import GradientObservers
from .mutation_check import MutationCheck
from .views import LAZY_FUNCTIONS


@dataclass(frozen=True)
class LazyHead:
    """Forward of a language-model head that returns lazy logits.

    Args:
        inputs: Name of the forward's argument.
        choice: Implementation that the user forced.
    """

    inputs: tuple[str, ...] = ("input",)
    choice: str | None = None
    kernels: ClassVar[tuple[str, ...]] = ("linear_cross_entropy",)

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
        """Return lazy logits."""
        weight, bias, kind = module.weight, module.bias, x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype in _CAST:  # the loss may be computed outside the autocast region
            dtype = torch.get_autocast_dtype(kind)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        mutation_check = MutationCheck({"the hidden states": x, "the head's weight": weight, "the head's bias": bias})
        source = HeadInputs(x, weight, bias, self.choice, mutation_check)
        logits: torch.Tensor = _Head.apply(x, weight, bias, source, x.dtype)  # type: ignore[no-untyped-call]
        return logits


def find_heads(root: nn.Module) -> dict[str, nn.Module]:
    """Return the heads of Transformers' models from ``root`` down, as they declare them, and ``root`` if it is a Linear."""
    heads = [root] if isinstance(root, nn.Linear) else []
    for module in root.modules():
        ask = getattr(module, "get_output_embeddings", None)
        heads += [ask()] if callable(ask) else []
    ids = {id(head) for head in heads if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward}
    return {path: module for path, module in root.named_modules() if id(module) in ids}


@dataclass(frozen=True)
class HeadInputs:
    """Inputs of a head, from which lazy logits are computed.

    Args:
        hidden: Hidden states, attached to the autograd graph, as are the others: the kernel has a backward of its own.
        weight: Weight of the head.
        bias: Bias of the head.
        choice: Implementation that the user forced.
        mutation_check: Check that the three have not changed since the head was called.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    choice: str | None
    mutation_check: MutationCheck


class LazyLogitsError(SlapoError):
    """Error of lazy logits that can no longer be computed, or are changed in place."""


class LazyLogits(torch.Tensor):
    """``hidden @ weight.T + bias`` in a dtype, not yet computed; or a view of ``base_view[0]``."""

    source: HeadInputs
    observers: GradientObservers
    materialized: torch.Tensor | None
    base_view: tuple[LazyLogits, Callable[[torch.Tensor], torch.Tensor]] | None

    @staticmethod
    def __new__(
        cls,
        source: HeadInputs,
        dtype: torch.dtype,
        of: tuple[LazyLogits, Callable[[torch.Tensor], torch.Tensor]] | None = None,
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

    def checked_source(self) -> HeadInputs:
        """Return the inputs of the head; raise ``LazyLogitsError`` if one was changed or freed since."""
        if what := self.source.mutation_check.mutation():
            lost = "logits that use_kernels('linear_cross_entropy') left to be computed are lost"
            way = "look at them, as by logits.detach(), and compute losses before that, or leave linear_cross_entropy out"
            raise LazyLogitsError(f"{lost}: somebody {what} since the head ran; {way}")
        return self.source

    def materialize(self) -> torch.Tensor:
        """Return the values, without gradients: these are those of ``_Head`` and ``_View``."""
        with torch.inference_mode(False), torch.no_grad():
            if self.base_view is not None:
                return self.base_view[1](self.base_view[0].materialize()).to(self.dtype)
            if self.materialized is None:
                source = self.checked_source()
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
            if func in LAZY_FUNCTIONS and first.is_lazy and (found := LAZY_FUNCTIONS[func](*args, **kwargs)) is not None:
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
