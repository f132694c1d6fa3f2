"""Names of the first-step checks, and the environment variable that switches them off."""

from __future__ import annotations

import os
from collections.abc import Iterable

from slapo_core import BuildError, get_logger

VARIABLE = "SLAPO_DISABLE_CHECKS"
"""Environment variable with names of disabled checks, or ``all``."""

CHECKS = {
    "rows": "losses that are no mean over rows, and modules that mix the rows of a micro-batch, are then not seen",
    "injected": "gradients that the model injects in its backward are then not seen, and weighted wrong",
}
"""Checks, with the faults that are not found without them."""


def disabled_checks() -> tuple[str, ...]:
    """Return the names of the checks that the environment variable disables.

    Raises:
        BuildError: an unknown name.
    """
    names = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    for name in sorted(names - {"all", *CHECKS}):
        raise BuildError(f"{VARIABLE} has {name!r}, which is no check; known are {', '.join(CHECKS)} and all")
    return tuple(CHECKS) if "all" in names else tuple(sorted(names))


def log_disabled_checks(names: Iterable[str]) -> None:
    """Log the faults that are not found without these checks."""
    for name in names:
        get_logger().info("the first-step check %r is off: %s", name, CHECKS[name])
