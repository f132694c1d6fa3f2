"""Table of the kernels, with the built-in implementations of each in order of preference."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from slapo_core import ScheduleError

from ..implementations import flash, inductor, liger

Function = Callable[..., Any]


@dataclass(frozen=True)
class Implementation:
    """One implementation of a kernel.

    Args:
        target: The function, or its ``"module:NAME"``; its arguments are those of the kernel's eager implementation.
        devices: Types of devices that it supports; default: all.
        dtypes: Dtypes that it supports; default: all.
        packages: Required distributions; ``liger-kernel`` counts as installed if a module ``liger_kernel`` can be found.
        needs: Function from a type of device to another missing requirement, or None if there is none.
        refuses: Function from the arguments of a call to the reason why it cannot compute them, or None. Another
            implementation takes the call, unless this one is forced.
        avoids: Function from the arguments of a call to whether the next implementation would be faster; not called for a
            forced implementation.
        preferred: For other plugins: whether it is tried before the implementations of ``slapo-kernels``.
        name: Its name; filled in by the registry.
        kernel: Name of the kernel; filled in by the registry.
        provider: Distribution and version that provide it; filled in by the registry.

    Raises:
        ScheduleError: devices, dtypes or packages are not tuples, or needs, refuses or avoids is not a function.
    """

    target: Function | str
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    packages: tuple[str, ...] = ()
    needs: Callable[[str], str | None] | None = None
    refuses: Callable[..., str | None] | None = None
    avoids: Callable[..., bool] | None = None
    preferred: bool = False
    name: str = ""
    kernel: str = ""
    provider: str = ""

    def __post_init__(self) -> None:
        for name, kind, example in (
            ("devices", str, "'cuda'"),
            ("dtypes", torch.dtype, "torch.bfloat16"),
            ("packages", str, "'a-b'"),
        ):
            given = getattr(self, name)
            if not isinstance(given, (tuple, list)) or not all(isinstance(each, kind) for each in given):
                raise ScheduleError(f"{name} of an Implementation are {given!r}; give a tuple such as ({example},)")
        for name in ("needs", "refuses", "avoids"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise ScheduleError(f"{name} of an Implementation is {getattr(self, name)!r}, not a function")

    def lacks(self, device: str, dtype: torch.dtype | None) -> str | None:
        """Return the reason why it cannot be used for a type of device and a dtype (None: any), or None if it can."""
        if self.devices and device not in self.devices:
            return f"works on {' and '.join(self.devices)}, not on {device}"
        if dtype is not None and self.dtypes and dtype not in self.dtypes:
            return f"takes {' and '.join(_dtype_name(each) for each in self.dtypes)}, not {_dtype_name(dtype)}"
        for package in self.packages:
            if importlib.util.find_spec(package.replace("-", "_")) is None:
                return f"needs {package}, which is not installed; pip install {package}"
        return self.needs(device) if self.needs else None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def lacks_compiler(device: str) -> str | None:
    """Return the reason why inductor cannot compile for a type of device, or None."""
    if device == "cpu":
        compilers = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl"]
        return (
            None if any(map(shutil.which, filter(None, compilers))) else "needs a C++ compiler, and there is none; install g++"
        )
    return None if importlib.util.find_spec("triton") else "needs triton, which is not installed; pip install triton"


def lacks_ampere(device: str) -> str | None:
    """Return the reason why flash-attn cannot run on the current GPU, or None."""
    if not torch.cuda.is_available():
        return "needs a GPU, and there is none"
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 8 else f"needs a GPU of compute capability 8.0 or above, not {major}.{minor}"


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
