"""The distributions a run depends on, and their versions. Imports nothing heavy."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

PACKAGES = (
    "slapo",
    "slapo-core",
    "slapo-sharding",
    "slapo-pipeline",
    "slapo-memory",
    "slapo-models",
    "slapo-fusion",
    "slapo-training",
    "slapo-torch",
    "slapo-plan",
    "slapo-report",
    "slapo-tune",
    "slapo-verify",
    "slapo-weights",
    "torch",
    "transformers",
)
ENGINES = (
    "slapo-deepspeed",
    "deepspeed",
    "slapo-megatron",
    "megatron-core",
    "slapo-kernels",
    "triton",
    "liger-kernel",
    "flash-attn",
)
"""And kernels; told of where they are installed."""


def versions() -> dict[str, str]:
    """Return what is installed: Python, the platform, Slapo's distributions, torch, transformers, other engines and kernels."""
    found = {"python": platform.python_version(), "platform": sys.platform}
    for name in (*PACKAGES, *ENGINES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in PACKAGES:
                found[name] = "not installed"
    return found
