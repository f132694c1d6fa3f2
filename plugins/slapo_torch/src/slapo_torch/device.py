"""The device of this rank."""

from __future__ import annotations

import torch
from torch import nn

from slapo_core.program import Program


def device_of(program: Program) -> torch.device:
    """Return the device of the mesh; without one that of the first parameter."""
    kind = program.mesh.device_type if program.mesh is not None else _parameter_device(program.module)
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _parameter_device(module: nn.Module) -> str:
    first = next(module.parameters(), None)
    return first.device.type if first is not None else "cpu"
