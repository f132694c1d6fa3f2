"""Flags that a schedule file or the folder of a model sets, where the user does not."""

from __future__ import annotations

from typing import Any

import typer

from ..run_data.saved_schedule import FLAGS, declares_space, saved_settings
from ..run_data.settings import is_folder


def with_schedule_values(ctx: typer.Context) -> dict[str, Any]:
    """Return the flags, with those that were not given set by the schedule file, and sizes by the folder of the model.

    Of a schedule file count its literal ``layout``, ``build`` and ``model``, as ``slapo plan --save`` writes them, and its
    ``best`` or the defaults of its space. A file of ``slapo plan`` is not run.

    Raises:
        SettingsError: a value of the file or the folder cannot work, or a flag contradicts the folder.
        TuneError: the file does not run, or its space cannot be used.
    """
    params = dict(ctx.params)
    given = {flag for flag in params if (source := ctx.get_parameter_source(flag)) and source.name != "DEFAULT"}
    values = _values(str(params.get("schedule") or ""))
    params |= {flag: value for flag, value in values.items() if flag in params.keys() - given}
    if is_folder(str(params.get("model") or "")):
        from ..training.model_folder import folder_sizes  # noqa: PLC0415 - Transformers takes seconds

        params |= folder_sizes(params["model"], {name: params[name] for name in given})
    return params


def _values(path: str) -> dict[str, Any]:
    if not path.endswith(".py"):
        return {}
    saved = saved_settings(path)
    if not declares_space(path):
        return saved
    from slapo_tune import schedule_values  # noqa: PLC0415 - it runs the file, which needs torch

    return saved | {FLAGS[name]: value for name, value in schedule_values(path).items() if name in FLAGS}
