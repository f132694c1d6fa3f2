"""Device of one rank."""

from __future__ import annotations

import torch

from slapo_core import Program


def device_of(program: Program) -> torch.device:
    """Return the device that a program runs on, on this rank."""
    first = next(program.module.parameters(), None)
    kind = first.device.type if first is not None else "cpu"
    if program.mesh is not None:
        kind = program.mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
