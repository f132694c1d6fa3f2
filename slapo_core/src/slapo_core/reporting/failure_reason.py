"""One-line reasons for failures of plugins."""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from pathlib import Path

import pluggy

from .errors import SlapoError

_INFRASTRUCTURE = (
    "<",
    pkgutil.__file__,
    *(str(path) for path in (Path(__file__).parents[1], Path(pluggy.__file__).parent, Path(importlib.__file__).parent)),
)
"""Files that only run the code that failed: Slapo's core, pluggy, Python's import system."""


def failure_reason(error: BaseException) -> str:
    """Return an error as one line, with the file and line of the plugin's code that raised it.

    The line names the type of the error unless the text alone is clear.

    Example:
        >>> failure_reason(ImportError("No module named 'megatron'")), failure_reason(KeyError("tp"))
        ("No module named 'megatron'", "KeyError: 'tp'")
    """
    text = "".join(char if char.isprintable() else "?" for char in " ".join(str(error).split()))
    plain = isinstance(error, ImportError | SlapoError | pluggy.PluginValidationError)
    return (text if plain and text else f"{type(error).__name__}: {text}") + _source_location(error)


def _source_location(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_INFRASTRUCTURE)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
