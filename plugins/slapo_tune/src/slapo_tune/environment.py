"""The environment of a trial: the values of its symbols as variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from .errors import TuneError

MARK = "SLAPO_TUNE_TRIAL"
"""The variable by which the processes of a trial are found, whatever session they are in."""


def trial_environment(values: Mapping[str, Any], mark: str) -> dict[str, str]:
    """Return this process's environment with each symbol in it, ``batch_size`` as ``SLAPO_TUNE_BATCH_SIZE``, ``BATCH_SIZE`` and
    ``batch_size``.

    Args:
        values: Values of the symbols.
        mark: Value of ``SLAPO_TUNE_TRIAL``, a name of the trial that no other has.
    """
    given = {variable: str(value) for name, value in values.items() for variable in variables(name)}
    return {"PYTHONUNBUFFERED": "1", **os.environ, **given, MARK: mark}


def variables(name: str) -> tuple[str, str, str]:
    """Return the names of the environment variables of a symbol."""
    bare = re.sub(r"\W", "_", name)
    return f"SLAPO_TUNE_{bare.upper()}", bare.upper(), bare


def check_names(names: Mapping[str, Any]) -> None:
    """Refuse symbols whose variables this process has already, as ``path``: trials may need what is there.

    Raises:
        TuneError: naming symbol and variable.
    """
    for name in names:
        if taken := [variable for variable in variables(name) if variable in os.environ]:
            raise TuneError(
                f"symbol({name!r}): the environment has a variable {taken[0]!r} already, by which a trial would get the value; "
                "call the symbol otherwise, or unset the variable"
            )
