"""Flags that a schedule file or the folder of a model sets, where the user does not."""

from __future__ import annotations

from typing import Any

import typer

from ..run_data.saved_schedule import FLAGS, declares_space, saved_settings
from ..run_data.settings import SettingsError, is_folder


def with_schedule_values(ctx: typer.Context) -> dict[str, Any]:
    """Return the flags, with those that were not given set by the schedule file, and sizes by the folder of the model.

    Of a schedule file count its literal ``layout``, ``build`` and ``model``, as ``slapo plan --save`` writes them, and its
    ``best`` or the defaults of its space. A file of ``slapo plan`` is not run.

    Raises:
        SettingsError: a value of the file or the folder cannot work, or a flag contradicts the folder.
        TuneError: the file does not run, or its space cannot be used.
    """
    params = dict(ctx.params)
    given = given_flags(ctx)
    path = str(params.get("schedule") or "")
    values = _values(path)
    _check_model(path, params.get("model") if "model" in given else None, values.get("model"))
    params |= {flag: value for flag, value in values.items() if flag in params.keys() - given}
    if is_folder(str(params.get("model") or "")):
        from ..training.model_folder import folder_sizes  # noqa: PLC0415 - Transformers takes seconds

        params |= folder_sizes(params["model"], {name: params[name] for name in given})
    return params


def given_flags(ctx: typer.Context) -> set[str]:
    """Return the names of the flags that the user gave."""
    return {flag for flag in ctx.params if (source := ctx.get_parameter_source(flag)) and source.name != "DEFAULT"}


def saved_options(path: str) -> dict[str, Any]:
    """Return the options of ``slapo.build`` that a planner's schedule file has, by their names there."""
    flags = saved_settings(path) if path.endswith(".py") else {}
    names = ("microbatches", "pipeline_schedule", "data_parallel", "precision")
    return {name: flags[FLAGS[name]] for name in names if FLAGS[name] in flags}


def _check_model(path: str, given: str | None, saved: str | None) -> None:
    """Refuse a model of another type than that of the schedule; folders may be copies of one another."""
    if given and saved and given != saved and not is_folder(given) and not is_folder(saved):
        raise SettingsError(f"--model {given}: the schedule {path} is for {saved}; leave the flag out, or plan {given}")


def _values(path: str) -> dict[str, Any]:
    if not path.endswith(".py"):
        return {}
    saved = saved_settings(path)
    if not declares_space(path):
        return saved
    from slapo_tune import schedule_values  # noqa: PLC0415 - it runs the file, which needs torch

    return saved | {FLAGS[name]: value for name, value in schedule_values(path).items() if name in FLAGS}
