"""Implementation of a kernel: a function, and its requirements."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slapo_core import ScheduleError

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
        ScheduleError: devices, dtypes or packages are no tuples, or needs, refuses or avoids is no function.
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
