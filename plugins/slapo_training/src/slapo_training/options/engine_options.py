"""Options of engines that are another project's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .common_options import CommonOptions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision to the type of floating-point weights."""


@dataclass(frozen=True)
class EngineOptions(CommonOptions):
    """The arguments of ``build`` for an engine that sums gradients by itself, and whose own configuration may say them, too."""

    @property
    def trains(self) -> bool:
        """True if there is an optimizer, ours or the engine's own."""
        return self.optimizer is not None

    @property
    def parts(self) -> int:
        return self.microbatches

    @property
    def settled_precision(self) -> str:
        """``"fp32"``, ``"bf16"`` or ``"fp16"``."""
        return self.precision

    @property
    def largest_norm(self) -> float:
        """Largest gradient norm; 0 is off."""
        return float(self.clip)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.settled_precision]
