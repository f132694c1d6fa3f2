"""The environment of a trial: the values of its symbols as variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ..search_space.errors import TuneError

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


def check_variables(values: Mapping[str, Any]) -> None:
    """Refuse symbols that the environment of a trial cannot hold.

    Raises:
        TuneError: the variable of a symbol is one that this process has already, as ``PATH``, the tuner's own, or that of
            another symbol; or a value is one that no variable can have.
    """
    owners: dict[str, str] = {}
    for name, value in values.items():
        for variable in dict.fromkeys(variables(name)):
            if variable in os.environ or variable == MARK:
                raise TuneError(
                    f"symbol({name!r}): the environment has a variable {variable!r} already, by which a trial would get the "
                    "value; call the symbol otherwise, or unset the variable"
                )
            if owners.setdefault(variable, name) != name:
                raise TuneError(
                    f"symbol({name!r}): its variable {variable!r} is that of {owners[variable]!r} too; call one otherwise"
                )
        try:
            unusable = b"\0" in os.fsencode(str(value))
        except UnicodeEncodeError:
            unusable = True
        if unusable:
            raise TuneError(f"symbol({name!r}): neither arguments nor the environment of a program can hold {str(value)!r}")
