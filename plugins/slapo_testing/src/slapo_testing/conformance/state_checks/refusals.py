"""Checks of refused calls: those of the example, and calls on other modules, a second time, and on meta weights."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from slapo_core import Schedule, SlapoError, init_empty_weights

from ..examples.case import Case, ConformanceError, check_sentence
from ..examples.examples import Refused
from ..examples.model_snapshot import Snapshot, copy_containers, first_of


def refusals(case: Case) -> None:
    """Check that a wrong call is refused in one sentence without a change; other calls may succeed or be refused so."""
    for refused in case.example.refused:
        _refuse(case, refused, f"{case.name}({_argument_text(refused)})")
    _refuse_other_modules(case)
    schedule = case.begin()
    case.step(schedule)
    _works_or_refuses(case, schedule, case.example.path, "the same call once more")
    _refuse_meta_model(case)


def _refuse(case: Case, refused: Refused, what: str) -> None:
    schedule = case.begin()
    args = copy_containers(refused.args(schedule) if callable(refused.args) else refused.args)
    with case.check_unchanged(schedule, f"after {what} was refused"):
        try:
            case.at(schedule, refused).apply(case.name, *args, **copy_containers(dict(refused.kwargs)))
        except Exception as error:
            check_sentence(error, what, case.name)
            if not re.search(refused.match, str(error)):
                raise ConformanceError(f"{what} is refused by {str(error)!r}, without {refused.match!r}") from error
        else:
            raise ConformanceError(f"{what} is accepted; it should be refused with {refused.match!r}")


def _refuse_other_modules(case: Case) -> None:
    """Call the primitive on the other modules of the example's model, one of each class."""
    schedule, found = case.begin(), dict[type[nn.Module], tuple[str, nn.Module]]()
    for path, module in schedule.mod.named_modules():
        found.setdefault(type(module), (path, module))
    for path, module in found.values():
        if path != case.example.path:
            where = f"{path!r}, a {type(module).__name__}," if path else "the whole model"
            _works_or_refuses(case, schedule, path, f"the same call on {where}")


def _refuse_meta_model(case: Case) -> None:
    """Call the primitive on a model on the meta device, if it can be made there and takes the steps of ``before``."""
    try:
        with init_empty_weights():
            model = case.model()
        schedule = case.begin(model)
    except Exception:
        return
    _works_or_refuses(case, schedule, case.example.path, "the step on a model on the meta device")


def _works_or_refuses(case: Case, schedule: Schedule, path: str, what: str) -> None:
    """Check that the call succeeds, or is refused without a change."""
    try:
        args, kwargs = case.arguments(schedule)
    except Exception:  # the author's function has no answer there
        return
    before = Snapshot(schedule)
    try:
        (schedule[path] if path else schedule).apply(case.name, *args, **kwargs)
    except SlapoError as error:
        check_sentence(error, what)
        if found := before.differences(Snapshot(schedule)):
            raise ConformanceError(f"after {what} was refused, {first_of(found)}") from error
    except Exception as error:
        kind = f"{type(error).__name__}, not a ScheduleError"
        raise ConformanceError(f"{what} raises {kind}: {error}") from error
    else:
        schedule.undo()


def _argument_text(refused: Refused) -> str:
    args = ["..."] if callable(refused.args) else [_short_text(value) for value in refused.args]
    return ", ".join([*args, *(f"{key}={_short_text(value)}" for key, value in refused.kwargs.items())])


def _short_text(value: Any) -> str:
    text = str(getattr(value, "__name__", None) or repr(value))
    return text if len(text) < 40 and " at 0x" not in text else type(value).__name__
