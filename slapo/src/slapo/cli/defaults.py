"""Values of flags that the user did not give: from the schedule file, and sizes from the folder of a model."""

from __future__ import annotations

from typing import Any

import typer

from ..run_data.saved_schedule import saved_settings
from ..run_data.settings import is_folder


def with_defaults(ctx: typer.Context) -> dict[str, Any]:
    """Return the flags of a command, where the schedule file and the model's folder fill in what the user did not give.

    Raises:
        SettingsError: the schedule file or the folder has a value that cannot work, or a flag contradicts the folder.
    """
    given = dict(ctx.params)
    sources = {name: ctx.get_parameter_source(name) for name in given}
    by_user = {name for name, source in sources.items() if source is None or source.name != "DEFAULT"}
    saved = saved_settings(given.get("schedule") or "")
    given |= {name: value for name, value in saved.items() if name in given and name not in by_user}
    if is_folder(given["model"]):
        from ..training.model_folder import folder_sizes  # noqa: PLC0415 - Transformers takes seconds

        given |= folder_sizes(given["model"], {name: given[name] for name in by_user if name in given})
    return given
