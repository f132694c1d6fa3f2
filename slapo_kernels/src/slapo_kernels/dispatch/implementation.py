"""One way to compute a kernel, and where it works."""

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
    """One way to compute a kernel.

    Args:
        target: The function, or ``"module:NAME"`` of it; its arguments are those of the kernel's eager implementation.
        devices: Types of devices it works on; default: all.
        dtypes: Of its tensors; default: all.
        packages: Distributions to install: ``liger-kernel`` is installed where a module ``liger_kernel`` can be found.
        needs: Says what else is lacking on a type of device, None where nothing is.
        refuses: Says of the arguments of a call why it cannot compute them, None where it can; another one does, unless this is
            forced.
        avoids: Says of the arguments of a call whether the next in order would be faster; asked of what nobody forces.
        preferred: Of another plugin's: whether it is tried before those of ``slapo-kernels``.
        name: What it is called; filled in.
        kernel: What it computes; filled in.
        provider: Distribution and version that bring it; filled in.

    Raises:
        ScheduleError: devices, dtypes or packages are no tuples, or what is asked is no function.
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
        """Why it cannot be used for tensors of this dtype on this type of device; None where it can.

        Args:
            device: Such as ``"cuda"``.
            dtype: None: any that it takes.
        """
        if self.devices and device not in self.devices:
            return f"works on {' and '.join(self.devices)}, not on {device}"
        if dtype is not None and self.dtypes and dtype not in self.dtypes:
            return f"takes {' and '.join(_short(each) for each in self.dtypes)}, not {_short(dtype)}"
        for package in self.packages:
            if importlib.util.find_spec(package.replace("-", "_")) is None:
                return f"needs {package}, which is not installed; pip install {package}"
        return self.needs(device) if self.needs else None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def lacks_compiler(device: str) -> str | None:
    """Why inductor cannot compile for a type of device."""
    if device == "cpu":
        compilers = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl"]
        return (
            None if any(map(shutil.which, filter(None, compilers))) else "needs a C++ compiler, and there is none; install g++"
        )
    return None if importlib.util.find_spec("triton") else "needs triton, which is not installed; pip install triton"


def lacks_ampere(device: str) -> str | None:
    """Why flash-attn does not run on the GPU there is."""
    if not torch.cuda.is_available():
        return "needs a GPU, and there is none"
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 8 else f"needs a GPU of compute capability 8.0 or above, not {major}.{minor}"
