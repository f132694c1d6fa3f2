"""The modules that ``use_kernels`` puts in: what was there, of a subclass whose forward calls kernels.

They hold the same parameters and parts under the same names and are instances of the same class. Where a kernel would do
work unseen that others want to see, they run the forward of the class that was there: while the model is traced; where
something was hooked to, or put in the place of, a part whose work a kernel does; and, unless an implementation is forced, while
``torch.compile`` goes over them, which fuses that forward itself.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from slapo_core import HOOK_TABLES
from slapo_tracing.nodes import MODULE_TABLES, is_opaque

from ..dispatch.dispatcher import run
from ..implementations._torch_private import is_watched
from .call_guard import Conditions
from .fused_ops import Gate, Step
from .meta_copies import rebind

_BODY = "_slapo_kernels"
_TABLES = (
    *MODULE_TABLES,
    *HOOK_TABLES,
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


class Body(Protocol):
    """What a swapped module computes, of a module and its inputs."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the method's arguments."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels it calls."""

    @property
    def forced(self) -> bool:
        """Whether a user has chosen an implementation."""

    def fits(self, module: Any, args: tuple[Any, ...]) -> bool:
        """Whether this is a call that the kernels are known to compute."""

    def __call__(self, module: Any, *args: Any) -> Any:
        """Compute it."""


class Swapped:
    """Mixed into the class of a module that was swapped."""

    _slapo_kernels: Body

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (type(self).__mro__[2],), self.__getstate__()  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        """What is known of the module, and the kernels."""
        parts = [super().extra_repr(), f"kernels={', '.join(self._slapo_kernels.kernels)}"]  # type: ignore[misc]
        return ", ".join(filter(None, parts))


def swapped(module: nn.Module, body: Body) -> nn.Module:
    """The module with another forward; ``module`` itself is left as it is."""
    new = _restored(type(module))
    vars(new).update({name: value.copy() if name in _TABLES else value for name, value in vars(module).items()})
    vars(new)[_BODY] = body
    rebind(module, new)
    return new


def body_of(module: nn.Module) -> Body | None:
    """What a swapped module computes; None of any other."""
    return vars(module).get(_BODY) if isinstance(module, Swapped) else None


def _restored(cls: type[nn.Module]) -> nn.Module:
    made = _subclass(cls)
    new: nn.Module = made.__new__(made)
    return new


_subclasses: dict[tuple[type[nn.Module], Any], type[nn.Module]] = {}


def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    key = cls, cls.forward
    if key not in _subclasses:
        methods = [name for name in ("forward", "_apply_gate") if hasattr(cls, name)]
        members = {"__module__": cls.__module__, "__doc__": cls.__doc__, **{name: _method(cls, name) for name in methods}}
        _subclasses[key] = type(f"Kernel{cls.__name__}", (Swapped, cls), members)
    return _subclasses[key]


def _method(cls: Any, name: str) -> Any:
    """A method that lets kernels compute what they can, and else does what the class's own does."""
    original, gate = getattr(cls, name), name != "forward"

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        body: Body | None = getattr(self, _BODY, None)
        own = getattr(cls, name)
        if body is None or isinstance(body, Experts) is not gate or own is not original:  # made to try the class out; patched
            return own(self, *args, **kwargs)
        given = args + tuple(kwargs[each] for each in body.inputs[len(args) :] if each in kwargs) if kwargs else args
        known = len(given) == len(body.inputs) == len(args) + len(kwargs)
        if known and not is_watched(body.forced) and body.fits(self, given):
            return body(self, *given)
        return own(self, *args, **kwargs)

    return method


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension.

    Args:
        inputs: Name of the forward's argument.
        kernel: ``"rms_norm"`` or ``"layer_norm"``.
        options: Of the kernel.
        packs: Whether the result is contiguous whatever the input is, which a dropout that follows draws its mask by.
        conditions: When it is one.
        choice: Implementation that a user has chosen.
    """

    inputs: tuple[str, ...]
    kernel: str
    options: Mapping[str, Any]
    packs: bool
    conditions: Conditions
    choice: str | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        """The one."""
        return (self.kernel,)

    @property
    def forced(self) -> bool:
        """Whether a user has chosen an implementation."""
        return self.choice is not None

    def fits(self, module: Any, args: tuple[Any, ...]) -> bool:
        """What norms make of several dtypes differs; that is left to them."""
        return self.conditions.hold(module, args) and args[0].dtype is module.weight.dtype

    def __call__(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """Of this module's weights."""
        found: torch.Tensor
        weights = (module.weight,) if self.kernel == "rms_norm" else (module.weight, getattr(module, "bias", None))
        found = run(self.kernel, x.contiguous() if self.packs else x, *weights, choice=self.choice, **self.options)
        return found


@dataclass(frozen=True)
class Lookup:
    """An embedding."""

    inputs: tuple[str, ...]
    choice: str | None = None
    kernels: ClassVar[tuple[str, ...]] = ("embedding",)

    @property
    def forced(self) -> bool:
        """Whether a user has chosen an implementation."""
        return self.choice is not None

    def fits(self, module: Any, args: tuple[Any, ...]) -> bool:
        """Any call, as long as the module is asked for no more than rows."""
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse

    def __call__(self, module: Any, ids: torch.Tensor) -> torch.Tensor:
        """Rows of this module's weight."""
        found: torch.Tensor = run("embedding", ids, module.weight, choice=self.choice, padding_idx=module.padding_idx)
        return found


@dataclass(frozen=True)
class Program:
    """Calls of a module's parts, and of kernels between them.

    Args:
        inputs: Names of the forward's arguments, all tensors.
        steps: In the order of the forward.
        conditions: When they do what the forward does.
        absorbed: Parts whose work a kernel does.
        choices: Kernel to the implementation that a user has chosen.
    """

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    conditions: Conditions
    absorbed: tuple[tuple[str, nn.Module], ...] = ()
    choices: tuple[tuple[str, str], ...] = ()

    @property
    def kernels(self) -> tuple[str, ...]:
        """Of the steps."""
        return tuple(dict.fromkeys(step.kernel for step in self.steps if step.kernel))

    @property
    def forced(self) -> bool:
        """Whether a user has chosen an implementation."""
        return bool(self.choices)

    def fits(self, module: Any, args: tuple[Any, ...]) -> bool:
        """Whether the kernels may do the parts' work."""
        return _are_there(module, self.absorbed) and self.conditions.hold(module, args)

    def __call__(self, module: Any, *args: torch.Tensor) -> torch.Tensor:
        """Run it on this module."""
        values, choices = list(args), dict(self.choices)
        for step in self.steps:
            values.append(step.run(module, values, choices.get(step.kernel or "")))
        return values[-1]


@dataclass(frozen=True)
class Experts:
    """A mixture's experts, whose own forward asks their method ``_apply_gate`` for the gate.

    Args:
        inputs: Name of the method's argument.
        step: The gate.
        conditions: When it is what the method computes.
        absorbed: Parts whose work the kernel does.
        choice: Implementation that a user has chosen.
    """

    inputs: tuple[str, ...]
    step: Gate
    conditions: Conditions
    absorbed: tuple[tuple[str, nn.Module], ...] = ()
    choice: str | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        """The one."""
        return (self.step.kernel,)

    @property
    def forced(self) -> bool:
        """Whether a user has chosen an implementation."""
        return self.choice is not None

    def fits(self, module: Any, args: tuple[Any, ...]) -> bool:
        """Whether the kernel may do the parts' work."""
        return _are_there(module, self.absorbed) and self.conditions.hold(module, args)

    def __call__(self, module: Any, gate_up: torch.Tensor) -> torch.Tensor:
        """The gate."""
        return self.step.run(module, [gate_up], self.choice)


def _are_there(module: Any, absorbed: tuple[tuple[str, nn.Module], ...]) -> bool:
    """Whether the parts that kernels stand for are still there and would do nothing else."""
    return all(module._modules.get(name) is part and not is_opaque(part) for name, part in absorbed)


class KernelCall(nn.Module):
    """In a traced module: one call of a kernel.

    Args:
        kernel: Its name.
        options: Of the kernel; of attention, whose masks are added, ``masks_out`` says that one is true where nothing is
            attended to.
        choice: Implementation that a user has chosen.
    """

    def __init__(self, kernel: str, options: Mapping[str, Any], choice: str | None = None) -> None:
        super().__init__()
        self.kernel, self.options, self.choice = kernel, dict(options), choice
        self.masks_out = bool(self.options.pop("masks_out", False))

    def forward(self, *args: Any) -> Any:
        """What the kernel computes of the inputs in its order."""
        if self.kernel == "attention" and len(args) > 3:
            mask = ~args[3] if self.masks_out else sum(args[4:], args[3])
            args = (*args[:3], mask if mask.dim() > 1 else mask.view(1, -1))
        return run(self.kernel, *args, choice=self.choice, **self.options)

    def extra_repr(self) -> str:
        """The kernel."""
        return ", ".join([self.kernel, *(f"{name}={value!r}" for name, value in self.options.items())])
