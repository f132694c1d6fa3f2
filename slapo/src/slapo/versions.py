"""The distributions a run depends on, and their versions. Imports nothing heavy."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

PACKAGES = ("slapo", "slapo-core", "slapo-sharding", "slapo-pipeline", "slapo-memory", "slapo-torch", "torch", "transformers")


def versions() -> dict[str, str]:
    """What is installed: Python, the platform, Slapo's distributions, torch and transformers."""
    found = {"python": platform.python_version(), "platform": sys.platform}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
