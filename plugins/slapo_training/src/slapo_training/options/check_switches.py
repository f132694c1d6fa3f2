"""Names of checks, and the option and the environment variable that switch them off."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from slapo_core import BuildError, get_logger

VARIABLE = "SLAPO_DISABLE_CHECKS"
"""Environment variable with names of disabled checks, or ``all``."""

CHECKS = {
    "rows": "losses that are not means over rows, and modules that mix the rows of a micro-batch, are then not seen",
    "injected": "gradients that the model injects in its backward are then not seen, and weighted wrong",
}
"""Checks, of the first step with the faults that are not found without them."""

_known = dict(CHECKS)
"""The checks of the first step and those that plugins have registered."""


def register_checks(checks: Mapping[str, str]) -> None:
    """Make the checks of a plugin known by name, each with a clause on the faults that nobody sees without it."""
    _known.update(checks)


def disabled_checks(check: Any = True) -> tuple[str, ...]:
    """Return the names of the checks that ``check=`` or the environment variable disables.

    False switches off all checks, ``{"rows": False}`` one of them.

    Raises:
        BuildError: an unknown name, or ``check`` is of another type.
    """
    is_dict = isinstance(check, Mapping) and all(type(is_on) is bool for is_on in check.values())
    if not is_dict and type(check) is not bool:
        raise BuildError(f"check is {check!r}; give True or False, or a dict such as {{'rows': False}} for checks by name")
    by_name = check if is_dict else {}
    by_variable = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    for source, names in (("check=", by_name), (VARIABLE, by_variable - {"all"})):
        for name in sorted(names, key=str):
            if name not in _known:
                every = "; check=False turns all off" if source == "check=" else " and all"
                raise BuildError(f"{source} has {name!r}, which is not a check; available: {', '.join(_known)}{every}")
    if check is False or "all" in by_variable:
        return tuple(_known)
    return tuple(name for name in _known if name in by_variable or by_name.get(name) is False)


def log_disabled_checks(disabled: Iterable[str], **log_options: Any) -> None:
    """Log in one line the faults that are not found without these checks; ``log_options`` are those of ``Logger.info``."""
    if lines := [f"{name!r}, {_known[name]}" for name in disabled]:
        get_logger().info("checks are off: %s", "; ".join(lines), **log_options)
