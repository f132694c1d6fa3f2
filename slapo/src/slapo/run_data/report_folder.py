"""The folder a run leaves its report in."""

from __future__ import annotations

import tempfile
from pathlib import Path

from .settings import Settings, SettingsError


def make_folder(settings: Settings) -> None:
    """Make the folder of ``--report``, if one was asked for, and try to write there: a run must not end in vain.

    Raises:
        SettingsError: it cannot be made or written to.
    """
    if not settings.report:
        return
    folder = Path(settings.report)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as err:
        raise SettingsError(
            f"--report {folder}: cannot be written to, {(err.strerror or str(err)).lower()}; give a folder that can be"
        ) from err
