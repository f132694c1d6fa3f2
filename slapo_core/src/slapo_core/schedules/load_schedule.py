"""Schedules read from files, and replayed on an unmodified model."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..reporting.errors import ScheduleError
from ..reporting.logger import get_logger
from .journal import FORMAT_VERSION, Step, error_prefix
from .schedule import Schedule, create_schedule
from .serialization import check_names, decode


def load_schedule(model: nn.Module, path: str | os.PathLike[str], trust: Sequence[str] = (), **options: Any) -> Schedule:
    """Replay a saved schedule on an unmodified model.

    A ``.json`` file is data: it can call installed primitives and name objects of ``torch.nn``, nothing else. A ``.py`` file is
    code that runs with the user's rights; it defines ``schedule(sch)``, or with slapo-tune ``schedule(sch, space)``.

    Args:
        model: The unmodified model.
        path: A file that ``sch.save`` wrote, or one written by hand.
        trust: Further modules whose classes and functions a ``.json`` file may import, e.g. ``["my_layers"]``.
        **options: Arguments of ``create_schedule``, and ``config``: values of the symbols of a ``.py`` file whose schedule has
            a space; default: the file's ``best``, else the default of each symbol.

    Raises:
        ScheduleError: unreadable, malformed, a step is refused, or an object is not trusted; names the file, and the line or
            step. The model is as before.

    Example:
        >>> import tempfile
        >>> def model():
        ...     return nn.Sequential(nn.ReLU())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sch = create_schedule(model())
        ...     sch["0"].replace(nn.Tanh())
        ...     sch.save(f"{folder}/tanh.json")
        ...     load_schedule(model(), f"{folder}/tanh.json")["0"].mod
        Schedule('0': Tanh)
        Tanh()
    """
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ScheduleError(f"cannot read the schedule {str(source)!r}: {err}") from err
    config = options.pop("config", None)
    schedule = create_schedule(model, **options)
    try:
        if source.suffix == ".py":
            _run_python(schedule, source, text, config)
        else:
            _run_json(schedule, source, text, trust)
    except BaseException:
        while len(schedule.journal):
            schedule.undo()
        raise
    return schedule


def _run_json(schedule: Schedule, source: Path, text: str, trust: Sequence[str]) -> None:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as err:
        raise ScheduleError(f"{source}:{err.lineno}: not JSON: {err.msg}") from err
    except (RecursionError, ValueError) as err:
        raise ScheduleError(f"{source}: not a schedule: {err}") from err
    if not isinstance(data, dict) or data.get("slapo_schedule") != FORMAT_VERSION or not isinstance(data.get("steps"), list):
        raise ScheduleError(f"{source}: not a saved schedule of format {FORMAT_VERSION}")
    model, former = schedule._root.model, data.get("model")
    place = str(source) if former in (None, model) else f"{source}, saved for a {former} and not a {model}"
    for number, entry in enumerate(data["steps"], 1):
        with error_prefix(f"{place}: step {number}"):
            step = _parse_step(entry)
            args, kwargs = decode([list(step.args), step.kwargs], trust, schedule)
            schedule[step.path].apply(step.name, *args, **kwargs)
    if place != str(source):
        get_logger().warning("loaded %s", place)


def _parse_step(entry: Any) -> Step:
    wanted = {"path": str, "name": str, "args": list, "kwargs": dict}
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), kind) for key, kind in wanted.items()):
        raise ScheduleError(f"not a step: {entry!r}; it needs {', '.join(wanted)}")
    check_names(entry["kwargs"])
    return Step(entry["path"], entry["name"], tuple(entry["args"]), entry["kwargs"])


def _run_python(schedule: Schedule, source: Path, text: str, config: Any) -> None:
    namespace: dict[str, Any] = {"__name__": f"slapo_schedule_{source.stem}", "__file__": str(source)}
    try:
        exec(compile(text, str(source), "exec"), namespace)  # noqa: S102 - a .py schedule is code the user asked to run
        bound = schedule._root.registry.hook.slapo_schedule_function(namespace=namespace, config=config)
        if not callable(function := bound or namespace.get("schedule")):
            raise ScheduleError(f"{source}: defines no function 'schedule(sch)'")
        function(schedule)
    except SystemExit as err:
        raise ScheduleError(f"{source}: leaves the program (sys.exit); a schedule returns") from err
    except SyntaxError as err:
        raise ScheduleError(f"{source}:{err.lineno}: {err.msg}") from err
    except Exception as err:
        lines = [frame.lineno for frame in traceback.extract_tb(err.__traceback__) if frame.filename == str(source)]
        if not lines and not (isinstance(err, TypeError) and callable(namespace.get("schedule"))):
            raise
        place = f":{lines[-1]}" if lines else ": schedule() does not take one argument, the schedule"
        with error_prefix(f"{source}{place}"):
            raise
