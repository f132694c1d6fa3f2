"""The modules that ``use_kernels`` puts in: what was there, of a subclass whose forward calls kernels.

They hold the same parameters and parts under the same names and are instances of the same class. Where a kernel would do
work unseen that others want to see, they run the forward of the class that was there: while the model is traced; where
something was hooked to, or put in the place of, a part whose work a kernel does; and, unless an implementation is forced, while
``torch.compile`` goes over them, which fuses that forward itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from slapo_core.wrapping import is_opaque

from ._torch_private import is_watched
from .recognise.copies import is_conv1d, rebind
from .registry import choose, run

_BODY = "_slapo_kernels"
_TABLES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Body(Protocol):
    """What a swapped module computes, of a module and its inputs."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the forward's arguments."""

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


_subclasses: dict[type[nn.Module], type[nn.Module]] = {}


def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _subclasses:
        _subclasses[cls] = _make_subclass(cls)
    return _subclasses[cls]


def _make_subclass(cls: type[nn.Module]) -> type[nn.Module]:
    original: Callable[..., Any] = cls.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        body: Body | None = getattr(self, _BODY, None)
        if body is None:  # made by somebody to try the class out
            return original(self, *args, **kwargs)
        given = args + tuple(kwargs[name] for name in body.inputs[len(args) :] if name in kwargs) if kwargs else args
        known = len(given) == len(body.inputs) == len(args) + len(kwargs)
        if known and not is_watched(body.forced) and body.fits(self, given):
            return body(self, *given)
        return original(self, *args, **kwargs)

    def apply_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
        body, ungated = self._slapo_kernels, cls._apply_gate  # type: ignore[attr-defined]
        known = isinstance(body, Experts) and not is_watched(body.forced) and body.fits(self, (gate_up,))
        return body.step.run(self, [gate_up], body.choice) if known else ungated(self, gate_up)  # type: ignore[no-any-return]

    members = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
    if hasattr(cls, "_apply_gate"):
        members["_apply_gate"] = apply_gate
    return type(f"Kernel{cls.__name__}", (Swapped, cls), members)


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension.

    Args:
        inputs: Name of the forward's argument.
        kernel: ``"rms_norm"`` or ``"layer_norm"``.
        options: Of the kernel.
        packs: Whether the result is contiguous whatever the input is, which a dropout that follows draws its mask by.
        choice: Implementation that a user has chosen.
    """

    inputs: tuple[str, ...]
    kernel: str
    options: Mapping[str, Any]
    packs: bool
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
        return isinstance(args[0], torch.Tensor) and args[0].dtype is module.weight.dtype

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
        """Any call."""
        return True

    def __call__(self, module: Any, ids: torch.Tensor) -> torch.Tensor:
        """Rows of this module's weight."""
        found: torch.Tensor = run("embedding", ids, module.weight, choice=self.choice, padding_idx=module.padding_idx)
        return found


Values = list[torch.Tensor]
"""Inputs of a program, then the result of each step."""


@dataclass(frozen=True)
class Call:
    """A step: call a part of the module."""

    part: str
    args: tuple[int, ...]
    kernel: ClassVar[str | None] = None

    def run(self, module: Any, values: Values, choice: str | None) -> torch.Tensor:
        """Its result."""
        result: torch.Tensor = module._modules[self.part](*[values[index] for index in self.args])
        return result


@dataclass(frozen=True)
class Activate:
    """A step: an activation, with the bias of the linear layer ``part`` where that can be had apart."""

    arg: int
    activation: str
    part: str | None
    kernel: ClassVar[str] = "bias_act"

    @property
    def kind(self) -> Any:
        """What it computes."""
        return "bias_act", (("activation", self.activation),), True

    def run(self, module: Any, values: Values, choice: str | None) -> torch.Tensor:
        """Its result."""
        x, bias = _product(module, self.part, values[self.arg], self.kernel, choice)
        found: torch.Tensor = run("bias_act", x, bias, choice=choice, activation=self.activation)
        return found


@dataclass(frozen=True)
class Gate:
    """A step: one value, activated, times another; or one half of a value times the other."""

    kernel: str
    gate: int
    up: int
    options: tuple[tuple[str, Any], ...]
    gate_first: bool = True

    @property
    def kind(self) -> Any:
        """What it computes."""
        return self.kernel, self.options, self.gate_first

    def run(self, module: Any, values: Values, choice: str | None) -> torch.Tensor:
        """Its result."""
        gate, up = values[self.gate], values[self.up]
        if self.gate == self.up:
            first, second = values[self.gate].chunk(2, dim=-1)
            gate, up = (first, second) if self.gate_first else (second, first)
        found: torch.Tensor = run(self.kernel, gate, up, choice=choice, **dict(self.options))
        return found


@dataclass(frozen=True)
class AddDropped:
    """A step: a residual sum with what the module's ``dropout`` leaves of a value, and of the bias of ``part``."""

    arg: int
    residual: int
    dropout: str
    part: str | None
    kernel: ClassVar[str] = "bias_dropout_residual"

    def run(self, module: Any, values: Values, choice: str | None) -> torch.Tensor:
        """Its result."""
        x, bias = _product(module, self.part, values[self.arg], self.kernel, choice)
        dropout = module._modules[self.dropout]
        residual = values[self.residual]
        found: torch.Tensor = run(self.kernel, x, bias, residual, choice=choice, p=dropout.p, training=dropout.training)
        return found


Step = Call | Activate | Gate | AddDropped


@dataclass(frozen=True)
class Program:
    """Calls of a module's parts, and of kernels between them.

    Args:
        inputs: Names of the forward's arguments, all tensors.
        steps: In the order of the forward.
        absorbed: Parts whose work a kernel does.
        choices: Kernel to the implementation that a user has chosen.
    """

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
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
        return _are_there(module, self.absorbed)

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
        step: The gate, of what the method is given.
        absorbed: Parts whose work the kernel does.
        choice: Implementation that a user has chosen.
    """

    step: Gate
    absorbed: tuple[tuple[str, nn.Module], ...] = ()
    choice: str | None = None
    inputs: ClassVar[tuple[str, ...]] = ()

    @property
    def kernels(self) -> tuple[str, ...]:
        """The one."""
        return (self.step.kernel,)

    @property
    def forced(self) -> bool:
        """Whether a user has chosen an implementation."""
        return self.choice is not None

    def fits(self, module: Any, args: tuple[Any, ...]) -> bool:
        """Whether a gate is asked for; the forward is their own."""
        return bool(args) and _are_there(module, self.absorbed)

    def __call__(self, module: Any, *args: Any) -> Any:
        """Never called: ``fits`` is true of gates alone."""
        raise NotImplementedError


def _are_there(module: Any, absorbed: tuple[tuple[str, nn.Module], ...]) -> bool:
    """Whether the parts that kernels stand for are still there and would do nothing else."""
    return all(module._modules.get(name) is part and not is_opaque(part) for name, part in absorbed)


def _product(
    module: Any, part: str | None, x: torch.Tensor, kernel: str, choice: str | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the linear layer ``part`` makes of ``x`` without its bias, and the bias; together where that is as fast.

    Or where the layer may be more than a product: hooked, wrapped, sharded, or of another forward.
    """
    if part is None:
        return x, None
    linear = module._modules[part]
    bias, transposed = linear.bias, is_conv1d(linear)
    plain = transposed or type(linear).forward is nn.Linear.forward
    if (
        bias is None
        or not plain
        or torch.compiler.is_compiling()  # before the next, which the compiler cannot follow
        or is_opaque(linear)
        or not _fuses(kernel, choice, x.device.type, x.dtype)
    ):
        return linear(x), None
    x = x @ linear.weight if transposed else F.linear(x, linear.weight)
    return x, bias.to(x.dtype)


@functools.cache
def _fuses(kernel: str, choice: str | None, device: str, dtype: torch.dtype) -> bool:
    """Whether an implementation adds a bias at no cost, as one operation with the rest."""
    return choose(kernel, device, dtype, choice).name != "eager"


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
            args = (*args[:3], ~args[3] if self.masks_out else sum(args[3:]))
        return run(self.kernel, *args, choice=self.choice, **self.options)

    def extra_repr(self) -> str:
        """The kernel."""
        return ", ".join([self.kernel, *(f"{name}={value!r}" for name, value in self.options.items())])
