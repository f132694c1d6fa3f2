"""Table of the kernels, with the built-in implementations of each in order of preference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..implementations import flash, inductor, liger
from .implementation import Implementation, lacks_ampere, lacks_compiler


@dataclass(frozen=True)
class Kernel:
    """A kernel and its built-in implementations.

    Args:
        name: Its name, as ``use_kernels`` takes it.
        implementations: Implementations of this distribution, best first; the last is eager, which supports everything.
        dtype_argument: Position of the argument whose device and dtype decide.
        on_cpu: Names of the implementations that come first on a CPU.
    """

    name: str
    implementations: tuple[Implementation, ...]
    dtype_argument: int = 0
    on_cpu: tuple[str, ...] = ()

    def order(self, device: str) -> dict[str, int]:
        """Return the rank of each implementation by name, on a type of device."""
        names = dict.fromkeys((*(self.on_cpu if device == "cpu" else ()), *(each.name for each in self.implementations)))
        return {name: place for place, name in enumerate(names)}


def _flex_refuses(*args: Any, **kwargs: Any) -> str | None:
    from ..implementations.flex import refuses  # noqa: PLC0415  FlexAttention takes a while to import

    return refuses(*args, **kwargs)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EAGER = Implementation("eager", name="eager")
_NATIVE = Implementation("native", name="native")
_INDUCTOR = Implementation("inductor", ("cpu", "cuda"), needs=lacks_compiler, avoids=inductor.avoids, name="inductor")
_FLEX = Implementation("flex", ("cuda",), _FLOATS, needs=lacks_compiler, refuses=_flex_refuses, name="flex")
_FLASH = Implementation("flash", ("cuda",), _FLOATS[1:], ("flash-attn",), lacks_ampere, flash.refuses, name="flash")


def _liger(refuses: Callable[..., str | None] | None = None) -> Implementation:
    return Implementation("liger", ("cuda",), _FLOATS, ("liger-kernel",), refuses=refuses, name="liger")


def _kernel(name: str, *implementations: Implementation, **settings: Any) -> Kernel:
    """Make a kernel; the targets of its implementations are modules of this package with a function of its name."""
    found = (
        replace(each, target=f"slapo_kernels.implementations.{each.target}:{name}", kernel=name, provider="slapo-kernels")
        for each in (*implementations, _EAGER)
    )
    return Kernel(name, tuple(found), **settings)


KERNELS = {
    kernel.name: kernel
    for kernel in (
        _kernel("attention", _FLASH, _NATIVE, _FLEX),
        _kernel("rotary", _INDUCTOR),
        _kernel("rms_norm", _liger(liger.refuses_rms_norm), _NATIVE, _INDUCTOR, on_cpu=("inductor",)),
        _kernel("layer_norm", _liger(liger.refuses_layer_norm), _NATIVE, _INDUCTOR),
        _kernel("swiglu", _INDUCTOR, _liger(liger.refuses_swiglu)),
        _kernel("geglu", _INDUCTOR, _liger(liger.refuses_geglu)),
        _kernel("bias_act", _INDUCTOR),
        _kernel("bias_dropout_residual", _INDUCTOR, on_cpu=("eager",)),
        _kernel("linear_cross_entropy", _NATIVE, _liger()),
        _kernel("embedding", _NATIVE, _liger(liger.refuses_embedding), dtype_argument=1),
    )
}
"""Name to kernel."""
