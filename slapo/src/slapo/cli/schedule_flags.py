"""Flags that a schedule file sets, where the user does not: the layout and options of its best."""

from __future__ import annotations

from typing import Any

import typer

_FLAGS = {
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "microbatches": "microbatches",
    "pipeline_schedule": "schedule_kind",
    "data_parallel": "data_parallel",
    "precision": "precision",
}
"""Symbol of a schedule's space to the flag that it sets."""


def with_schedule_values(ctx: typer.Context) -> dict[str, Any]:
    """Return the flags, with those that were not given set by the schedule file's ``best``, or the defaults of its space.

    Raises:
        TuneError: the file does not run, or its space cannot be used.
    """
    params = dict(ctx.params)
    if not str(params.get("schedule", "")).endswith(".py"):
        return params
    from slapo_tune import schedule_values  # noqa: PLC0415 - it runs the file, which needs torch

    values = schedule_values(params["schedule"])
    given = {flag for flag in params if (source := ctx.get_parameter_source(flag)) and source.name != "DEFAULT"}
    return params | {flag: values[name] for name, flag in _FLAGS.items() if name in values and flag in params.keys() - given}
