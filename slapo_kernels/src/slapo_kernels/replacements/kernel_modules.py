"""Kernel modules: instances of a subclass of the original class, with the same parameters and children, that call kernels.

The forward of the original class runs where the operations of a kernel must stay visible: while the model is traced; if a
child whose work a kernel does has a hook or was replaced; and under ``torch.compile``, which fuses that forward itself,
unless an implementation is forced.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from slapo_core import HOOK_TABLES
from slapo_tracing.nodes import MODULE_TABLES, is_opaque

from ..dispatch.dispatcher import run
from ..implementations._torch_private import is_traced_or_compiled
from .call_guard import CallGuard
from .fused_ops import FusedOp
from .meta_copies import rebind_methods

_KERNEL_FORWARD = "_slapo_kernels"
_TABLES = (
    *MODULE_TABLES,
    *HOOK_TABLES,
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class KernelForward(ABC):
    """Forward of a kernel module, called with the module and its inputs.

    Attributes:
        inputs: Names of the arguments of the replaced method.
        choice: Implementation that the user forced.
        method: Name of the replaced method.
    """

    inputs: tuple[str, ...]
    choice: str | None
    method: str = "forward"

    @property
    @abstractmethod
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that it calls."""

    @property
    def is_forced(self) -> bool:
        """True if the user forced an implementation."""
        return self.choice is not None

    @abstractmethod
    def admits(self, module: Any, args: tuple[Any, ...]) -> bool:
        """Return whether the kernels compute this call."""

    @abstractmethod
    def __call__(self, module: Any, *args: Any) -> Any: ...


class KernelModule:
    """Mixin of the class of every kernel module."""

    _slapo_kernels: KernelForward

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_instance, (type(self).__mro__[2],), self.__getstate__()  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        """Return the module's own description and the names of the kernels."""
        parts = [super().extra_repr(), f"kernels={', '.join(self._slapo_kernels.kernels)}"]  # type: ignore[misc]
        return ", ".join(filter(None, parts))


def with_kernels(module: nn.Module, kernel_forward: KernelForward) -> nn.Module:
    """Return a shallow copy of the module with another forward; ``module`` itself does not change."""
    new = _new_instance(type(module))
    vars(new).update({name: value.copy() if name in _TABLES else value for name, value in vars(module).items()})
    vars(new)[_KERNEL_FORWARD] = kernel_forward
    rebind_methods(module, new)
    return new


def kernel_forward_of(module: nn.Module) -> KernelForward | None:
    """Return the forward of a kernel module; None for any other module."""
    return vars(module).get(_KERNEL_FORWARD) if isinstance(module, KernelModule) else None


_subclasses: dict[tuple[type[nn.Module], Any], type[nn.Module]] = {}


def _new_instance(cls: type[nn.Module]) -> nn.Module:
    key = cls, cls.forward
    if key not in _subclasses:
        methods = [name for name in ("forward", "_apply_gate") if hasattr(cls, name)]
        members = {"__module__": cls.__module__, "__doc__": cls.__doc__, **{name: _method(cls, name) for name in methods}}
        _subclasses[key] = type(f"Kernel{cls.__name__}", (KernelModule, cls), members)
    new: nn.Module = _subclasses[key].__new__(_subclasses[key])
    return new


def _method(cls: Any, name: str) -> Any:
    """Return a method that calls the kernels if they admit the call, and the class's own method otherwise."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel_forward: KernelForward | None = getattr(self, _KERNEL_FORWARD, None)
        own = getattr(cls, name)
        # an instance without kernels, or a class that was patched later
        if kernel_forward is None or kernel_forward.method != name or own is not original:
            return own(self, *args, **kwargs)
        given = args + tuple(kwargs[each] for each in kernel_forward.inputs[len(args) :] if each in kwargs) if kwargs else args
        known = len(given) == len(kernel_forward.inputs) == len(args) + len(kwargs)
        if known and not is_traced_or_compiled(kernel_forward.is_forced) and kernel_forward.admits(self, given):
            return kernel_forward(self, *given)
        return own(self, *args, **kwargs)

    return method


@dataclass(frozen=True)
class NormForward(KernelForward):
    """Forward of a norm over the last dimension.

    Args:
        kernel: ``"rms_norm"`` or ``"layer_norm"``.
        contiguous_output: Whether the result is contiguous for any input; the mask of a later dropout depends on its strides.
    """

    inputs: tuple[str, ...]
    kernel: str
    options: Mapping[str, Any]
    contiguous_output: bool
    guard: CallGuard
    choice: str | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        return (self.kernel,)

    def admits(self, module: Any, args: tuple[Any, ...]) -> bool:
        """Return whether the guard admits the call; modules differ in how they mix dtypes, so input and weight share one."""
        return self.guard.admits(module, args) and args[0].dtype is module.weight.dtype

    def __call__(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor
        weights = (module.weight,) if self.kernel == "rms_norm" else (module.weight, getattr(module, "bias", None))
        found = run(self.kernel, x.contiguous() if self.contiguous_output else x, *weights, choice=self.choice, **self.options)
        return found


@dataclass(frozen=True)
class EmbeddingForward(KernelForward):
    """Forward of an embedding."""

    inputs: tuple[str, ...]
    choice: str | None = None
    kernels: ClassVar[tuple[str, ...]] = ("embedding",)

    def admits(self, module: Any, args: tuple[Any, ...]) -> bool:
        """Return whether the module has no option besides ``padding_idx``."""
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse

    def __call__(self, module: Any, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = run("embedding", ids, module.weight, choice=self.choice, padding_idx=module.padding_idx)
        return found


@dataclass(frozen=True)
class FusedForward(KernelForward):
    """Forward that calls a module's children, and kernels between them; or the gate of a mixture's experts.

    Args:
        inputs: Names of the method's arguments, all tensors.
        steps: Operations in the order of the method.
        guard: Conditions on the call.
        absorbed: Names and modules of the children whose work a kernel does.
        choices: Kernel to the implementation that the user forced.
        method: Name of the replaced method: ``"forward"``, or the experts' ``"_apply_gate"``, which their own forward calls.
    """

    inputs: tuple[str, ...]
    steps: tuple[FusedOp, ...]
    guard: CallGuard
    absorbed: tuple[tuple[str, nn.Module], ...] = ()
    choices: tuple[tuple[str, str], ...] = ()
    method: str = "forward"

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(step.kernel for step in self.steps if step.kernel))

    @property
    def is_forced(self) -> bool:
        return bool(self.choices)

    def admits(self, module: Any, args: tuple[Any, ...]) -> bool:
        """Return whether the absorbed children are still the module's, without hooks, and the guard admits the call."""
        unchanged = all(module._modules.get(name) is part and not is_opaque(part) for name, part in self.absorbed)
        return unchanged and self.guard.admits(module, args)

    def __call__(self, module: Any, *args: torch.Tensor) -> torch.Tensor:
        values, choices = list(args), dict(self.choices)
        for step in self.steps:
            values.append(step.run(module, values, choices.get(step.kernel or "")))
        return values[-1]


class KernelCall(nn.Module):
    """One call of a kernel in a traced module.

    Args:
        options: Options of the kernel. For attention, ``mask_is_inverted`` says that the mask is True for keys that are hidden;
            else masks are added to the scores.
    """

    def __init__(self, kernel: str, options: Mapping[str, Any], choice: str | None = None) -> None:
        super().__init__()
        self.kernel, self.options, self.choice = kernel, dict(options), choice
        self.mask_is_inverted = bool(self.options.pop("mask_is_inverted", False))

    def forward(self, *args: Any) -> Any:
        """Call the kernel with its inputs in order."""
        if self.kernel == "attention" and len(args) > 3:
            mask = ~args[3] if self.mask_is_inverted else sum(args[4:], args[3])
            args = (*args[:3], mask if mask.dim() > 1 else mask.view(1, -1))
        return run(self.kernel, *args, choice=self.choice, **self.options)

    def extra_repr(self) -> str:
        return ", ".join([self.kernel, *(f"{name}={value!r}" for name, value in self.options.items())])
