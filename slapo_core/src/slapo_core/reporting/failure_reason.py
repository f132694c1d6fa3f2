"""Why something of a plugin failed, in one line."""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from pathlib import Path

import pluggy

from .errors import SlapoError

_NOT_THE_CAUSE = (
    "<",
    pkgutil.__file__,
    *(str(path) for path in (Path(__file__).parents[1], Path(pluggy.__file__).parent, Path(importlib.__file__).parent)),
)
"""Code that runs what failed: Slapo's core, pluggy, Python's import system."""


def failure_reason(error: BaseException) -> str:
    """An error in one line, with the file and line of a stranger's code that raised it.

    Its type is named where the text alone does not say enough.
    """
    text = "".join(char if char.isprintable() else "?" for char in " ".join(str(error).split()))
    plain = isinstance(error, ImportError | SlapoError | pluggy.PluginValidationError)
    return (text if plain and text else f"{type(error).__name__}: {text}") + _place(error)


def _place(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THE_CAUSE)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
