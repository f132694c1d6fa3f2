"""Schedule files with a space: ``space(space)``, ``schedule(sch, space)``, and ``best``, the values of a run."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from slapo_core import Schedule, ScheduleError, SlapoError

from ..search_space.symbol import TuneError
from .schedule_space import ScheduleSpace

VARIABLE = "SLAPO_SCHEDULE_VALUES"
"""Environment variable with the values of a trial, a JSON object; ``load_schedule`` in a tuned script reads it."""

RUN_SYMBOLS = ("tp", "pp", "dp", "microbatches", "pipeline_schedule", "data_parallel", "precision")
"""Symbols that set the layout and options of a run beside the steps of a schedule."""

SpaceFunction = Callable[[ScheduleSpace], Any]


def takes_space(function: Any) -> bool:
    """Return whether a function takes a schedule and a space, rather than a schedule alone."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len([each for each in positional if each.default is each.empty]) == 2


def bind_schedule(namespace: Mapping[str, Any], config: Mapping[str, Any] | None) -> Callable[[Schedule], Any] | None:
    """Return the schedule of a file with its space bound; None if ``schedule`` takes no space.

    The values are those of ``config``, over the variable ``SLAPO_SCHEDULE_VALUES``, over the file's ``best``. A
    ``ScheduleSpace`` as ``config`` chooses them itself.
    """
    function = namespace.get("schedule")
    if not callable(function) or not takes_space(function):
        return None
    given = dict(config or {})
    space = config if isinstance(config, ScheduleSpace) else ScheduleSpace({**_best(namespace), **_variable(), **given})
    declare(namespace.get("space"), space)
    return partial(_run_with_space, function, space, given)


def _run_with_space(
    function: Callable[[Schedule, ScheduleSpace], Any], space: ScheduleSpace, given: Mapping[str, Any], sch: Schedule
) -> None:
    function(sch, space)
    if unknown := [name for name in given if name not in space and name not in RUN_SYMBOLS]:
        raise ScheduleError(f"config: the schedule has no symbol {unknown[0]!r}; it has {', '.join(space) or 'none'}")


def _variable() -> dict[str, Any]:
    text = os.environ.get(VARIABLE, "{}")
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ScheduleError(f"{VARIABLE} is {text!r}; set it to a JSON object of values by symbol, or unset it")
    return values


def _best(namespace: Mapping[str, Any]) -> dict[str, Any]:
    best = namespace.get("best", {})
    if not isinstance(best, Mapping):
        raise ScheduleError(f"best is {best!r}; make it a dict of values by symbol")
    return dict(best)


def declare(function: Any, space: ScheduleSpace) -> None:
    """Call the ``space(space)`` of a schedule file, if it has one."""
    if function is None:
        return
    if not callable(function):
        raise TuneError(f"space is {function!r}; make it a function that declares symbols, def space(space)")
    try:
        function(space)
    except SlapoError:
        raise
    except Exception as err:
        frame = traceback.extract_tb(err.__traceback__)[-1]
        raise TuneError(f"space(space) fails at {frame.filename}:{frame.lineno} with {type(err).__name__}: {err}") from err


def read_schedule_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Run a Python schedule file and return the names that it defines.

    Raises:
        TuneError: the file cannot be read or does not run, or has no function ``schedule``.
    """
    source = Path(path)
    try:
        code = compile(source.read_text(encoding="utf-8"), str(source), "exec")
        namespace: dict[str, Any] = {"__name__": f"slapo_schedule_{source.stem}", "__file__": str(source)}
        exec(code, namespace)  # noqa: S102 - a .py schedule is code the user asked to run
    except OSError as err:
        raise TuneError(f"schedule({str(source)!r}): it cannot be read: {err}; give a Python file") from err
    except (Exception, SystemExit) as err:
        raise TuneError(
            f"schedule({str(source)!r}): the file does not run: {type(err).__name__}: {err}; run it alone to see where"
        ) from err
    if not callable(namespace.get("schedule")):
        raise TuneError(f"schedule({str(source)!r}): the file defines no function schedule(sch, space); define one")
    return namespace


def copy_schedule(source: str, values: Mapping[str, Any], path: Path) -> None:
    """Copy a schedule file, whose space takes any values, and let it run with these."""
    shutil.copyfile(source, path)
    append_best(path, values)


def append_best(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Append ``best``, the values of a run, to a Python schedule file."""
    text = json.dumps(dict(values))
    for word, python in (("true", "True"), ("false", "False"), ("null", "None")):
        text = text.replace(f" {word}", f" {python}")
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"\n\nbest = {text}")


def schedule_values(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the values that a Python schedule file declares for a run: its ``best`` over the defaults of its ``space``.

    The dicts ``layout`` and ``build`` of a planner's file count too. Symbols that only ``schedule(sch, space)`` itself declares
    are not in it, unless ``best`` has them.

    Raises:
        TuneError: the file does not run, or its space cannot be used.
    """
    namespace = read_schedule_file(path)
    try:
        best = {**_best(namespace), **_variable()}
        space = ScheduleSpace(best)
        declare(namespace.get("space"), space)
    except SlapoError as err:
        raise TuneError(f"schedule({os.fspath(path)!r}): its space cannot be used: {err}") from err
    planned = [namespace[name] for name in ("layout", "build") if isinstance(namespace.get(name), Mapping)]
    return {name: value for values in [*planned, best, space] for name, value in values.items()}
