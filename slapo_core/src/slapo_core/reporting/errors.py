"""Errors for users. ``assert`` is for internal bugs only."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import traceback
from collections.abc import Iterable
from pathlib import Path

import pluggy


class SlapoError(Exception):
    """Base class of all errors that Slapo raises on purpose.

    Example:
        >>> try:
        ...     create_schedule(nn.ReLU()).annotate("weight", "group", 1)
        ... except SlapoError as error:
        ...     print(error)
        annotate(''): no parameter or buffer 'weight'; it has: none
    """


class ScheduleError(SlapoError):
    """An illegal step of a schedule. The model was not changed.

    Args:
        message: One lower-case sentence: what is wrong, with the value, and what would work.
        path: Dotted path of the module that the step was for; ``""`` is the top module.
        primitive: Name of the primitive; prefixes the message if given.

    Example:
        >>> print(ScheduleError("dim 0 has size 3, not divisible by 2 ranks", path="fc", primitive="shard"))
        shard('fc'): dim 0 has size 3, not divisible by 2 ranks
    """

    def __init__(self, message: str, *, path: str = "", primitive: str | None = None) -> None:
        self.path = path
        self.primitive = primitive
        super().__init__(f"{primitive}({path!r}): {message}" if primitive else message)


class PluginError(SlapoError):
    """A plugin that cannot be used.

    Args:
        message: One lower-case sentence that names the plugin.
        owner: The plugin, with its distribution and version.

    Example:
        >>> raise PluginError("plugin 'quant' (slapo-quant 0.1) did not load", owner="plugin 'quant' (slapo-quant 0.1)")
        Traceback (most recent call last):
        slapo_core.reporting.errors.PluginError: plugin 'quant' (slapo-quant 0.1) did not load
    """

    def __init__(self, message: str, *, owner: str = "") -> None:
        self.owner = owner
        super().__init__(message)


class UnknownNameError(SlapoError, LookupError):
    """A primitive, dialect, module path or option that does not exist.

    Example:
        >>> print(UnknownNameError.of("mode", "fst", ["fast", "exact"]))
        no mode 'fst'; did you mean 'fast'?; available: exact, fast
    """

    @classmethod
    def of(cls, kind: str, name: str, available: Iterable[str], notes: Iterable[str] = (), whose: str = "") -> UnknownNameError:
        """Return the error with the nearest known name and all available ones.

        Args:
            kind: Word for the kind of name, e.g. ``"primitive"``.
            name: The unknown name.
            available: The known names.
            notes: Further clauses of the message.
            whose: Owner of the names, e.g. ``"target 'torch'"``.
        """
        known = sorted(available)
        parts = [f"no {kind} {name!r}" + (whose and f" of {whose}")]
        if near := difflib.get_close_matches(name, known, n=1):
            parts.append(f"did you mean {near[0]!r}?")
        parts.append(f"available: {', '.join(known) or 'none'}")
        return cls("; ".join([*parts, *notes]))


class TraceError(SlapoError):
    """A module that cannot be traced.

    Args:
        message: One lower-case sentence.
        source: ``file:line`` in the model's source, if known.
        failing_module: Path, in the model, of the innermost module in whose recorded forward the trace failed, if known.

    Example:
        >>> print(TraceError("the forward branches on a tensor", source="model.py:12"))
        the forward branches on a tensor (model.py:12)
    """

    def __init__(self, message: str, *, source: str | None = None, failing_module: str | None = None) -> None:
        self.source, self.failing_module = source, failing_module
        super().__init__(f"{message} ({source})" if source else message)


class BuildError(SlapoError):
    """A schedule or option that the engine does not support, or a rank that differs from the others.

    Example:
        >>> build(create_schedule(nn.ReLU()), clip=1.0)
        Traceback (most recent call last):
        slapo_core.reporting.errors.BuildError: target=None gives a plain module and has no use for clip
    """


class VerifyError(SlapoError):
    """A scheduled model whose results differ from those of the unmodified model.

    Example:
        >>> issubclass(VerifyError, SlapoError)
        True
    """


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
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_INFRASTRUCTURE)]
    location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return (text if plain and text else f"{type(error).__name__}: {text}") + location
