"""Logits that are not computed until somebody looks at them: a cross entropy does not have to.

They are tensors like others, with gradients; what is computed from them is computed from the real ones, made once. But casts,
views and slices that keep the last dimension whole stay lazy, and of such the cross entropy is the kernel's, which takes the
hidden states and the weight of the head. Once some are computed, those they are views of, and all views of these, are too;
until then, hidden states and weight have to be what they were when the head was called.
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
from .cross_entropy import Watch
from .mutation_check import Unchanged
from .views import LAZY


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
        tensors = [x, module.weight, *([] if module.bias is None else [module.bias])]
        plain = all(type(each) in (torch.Tensor, nn.Parameter) and each.device == x.device for each in tensors)
        if not plain or x.is_meta or not torch.is_grad_enabled() or is_transformed() or is_opaque(module):
            return False
        dtypes = {each.dtype for each in tensors}
        alike = len(dtypes) == 1 and x.is_floating_point()
        cast = torch.is_autocast_enabled(x.device.type) and dtypes <= _CAST
        return (alike or cast) and x.dim() > 1 and x.shape[-1] == module.weight.shape[-1]

    def __call__(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """Lazy logits."""
        weight, bias, kind = module.weight, module.bias, x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype in _CAST:  # the loss may be computed outside of it
            dtype = torch.get_autocast_dtype(kind)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        unchanged = Unchanged({"the hidden states": x, "the head's weight": weight, "the head's bias": bias})
        source = Source(x, weight, bias, self.choice, unchanged)
        logits: torch.Tensor = _Head.apply(x, weight, bias, source, x.dtype)  # type: ignore[no-untyped-call]
        return logits


def find_heads(root: nn.Module) -> dict[str, nn.Module]:
    """The heads of models of Transformers from ``root`` down, which say what theirs is, or ``root`` if it is a Linear."""
    heads = [root] if isinstance(root, nn.Linear) else []
    for module in root.modules():
        ask = getattr(module, "get_output_embeddings", None)
        heads += [ask()] if callable(ask) else []
    ids = {id(head) for head in heads if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward}
    return {path: module for path, module in root.named_modules() if id(module) in ids}


@dataclass(frozen=True)
class Source:
    """What logits are computed of.

    Args:
        hidden: With its history, as the others: the kernel has gradients of its own.
        weight: Of the head.
        bias: Of the head.
        choice: Implementation that a user has chosen.
        unchanged: All three, as they were when the head was called.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    choice: str | None
    unchanged: Unchanged


class LazyLogitsError(SlapoError):
    """Logits that were left to be computed, and cannot be, or are to be changed in place."""


class LazyLogits(torch.Tensor):
    """``hidden @ weight.T + bias``, in a dtype; or a view ``of`` others."""

    source: Source
    watch: Watch
    numbers: torch.Tensor | None
    of: tuple[LazyLogits, Callable[[torch.Tensor], torch.Tensor]] | None

    @staticmethod
    def __new__(
        cls,
        source: Source,
        dtype: torch.dtype,
        of: tuple[LazyLogits, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    ) -> LazyLogits:
        """Nothing is computed."""
        hidden = source.hidden
        shape = (*hidden.shape[:-1], len(source.weight))
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        made.source, made.of, made.numbers = source, of, None
        made.watch = Watch(of[0].watch if of else None)
        return made

    @property
    def is_lazy(self) -> bool:
        """Whether there are no numbers yet."""
        return self.numbers is None and (self.of is None or self.of[0].is_lazy)

    def other(self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The logits of other hidden states: what is done to these is done to them."""
        source = replace(self.source, hidden=change(self.source.hidden))
        made: torch.Tensor = _View.apply(self, source, change, dtype or self.dtype)  # type: ignore[no-untyped-call]
        return made

    def checked(self) -> Source:
        """What they are computed of.

        Raises:
            LazyLogitsError: it is not what it was.
        """
        if what := self.source.unchanged.breach():
            lost = "logits that use_kernels('linear_cross_entropy') left to be computed are lost"
            way = "look at them, as by logits.detach(), and compute losses before that, or leave linear_cross_entropy out"
            raise LazyLogitsError(f"{lost}: somebody {what} since the head ran; {way}")
        return self.source

    def computed(self) -> torch.Tensor:
        """The numbers; gradients are autograd's business.

        Raises:
            LazyLogitsError: what they are computed of is not what it was.
        """
        with torch.inference_mode(False), torch.no_grad():
            if self.of is not None:
                return self.of[1](self.of[0].computed()).to(self.dtype)
            if self.numbers is None:
                source = self.checked()
                with torch.autocast(self.device.type, enabled=False):
                    self.numbers = F.linear(source.hidden, source.weight, source.bias).to(self.dtype)
            return self.numbers

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.detach())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        in_place = name in _IN_PLACE or (name.endswith("_") and name[:2] != "__" and name != "requires_grad_")
        if (in_place or func == _SET_DATA) and isinstance(first, LazyLogits):
            raise _changed(name)
        if isinstance(first, LazyLogits):
            if func in _WATCHES and not (first.watch.has_loss and is_fsdp_hook(args[-1])):  # whose loss has that hook as well
                first.watch.is_set = True
            if func in LAZY and first.is_lazy and (found := LAZY[func](*args, **kwargs)) is not None:
                return found
            if func == _DATA:
                return first.detach()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*pytree.tree_map_only(LazyLogits, _plain, args) if func in _READ else args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        written = [
            value for value, of in zip(args, func._schema.arguments, strict=False) if of.alias_info and of.alias_info.is_write
        ]
        if any(isinstance(value, LazyLogits) for value in [*written, (kwargs or {}).get("out")]):
            raise _changed(str(func))
        args, kwargs = pytree.tree_map_only(LazyLogits, LazyLogits.computed, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Head(torch.autograd.Function):
    """Lazy logits as autograd sees them: the gradients of a linear layer."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, source: Source, dtype: torch.dtype
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
        of_weight = None if hidden is None else rows.t() @ hidden.flatten(0, -2)
        return (
            None if weight is None else grad @ weight,
            of_weight,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


class _View(torch.autograd.Function):
    """Those of other hidden states, as autograd sees them: the gradients of a view and a cast."""

    @staticmethod
    def forward(
        ctx: Any, logits: LazyLogits, source: Source, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
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


def _plain(logits: LazyLogits) -> torch.Tensor:
    return logits.detach().requires_grad_(logits.requires_grad)


def _changed(name: str) -> LazyLogitsError:
    what = f"{name} changes logits in place that use_kernels('linear_cross_entropy') has left to be computed"
    return LazyLogitsError(f"{what}; change a clone()")


_CAST = {torch.float32, torch.bfloat16, torch.float16}
"""What autocast casts."""
_IN_PLACE = frozenset(f"__{name}__" for name in "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split())
_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_READ = tuple(
    getattr(torch.Tensor, name)
    for name in "__array__ __dlpack__ __reduce_ex__ data_ptr numpy storage tolist untyped_storage".split()
)
"""What torch does not do with tensors of other classes: of their numbers it does."""
_WATCHES = (torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.Tensor.grad_fn.__get__)  # type: ignore[union-attr]
"""By what somebody waits for gradients; those of the loss go by the logits from then on."""
