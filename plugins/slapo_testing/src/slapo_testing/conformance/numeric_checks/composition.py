"""Checks of the step combined with ``trace`` and ``checkpoint``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slapo_core import Schedule, SlapoError
from slapo_tracing.nodes import wrap_forward

from ..examples.case import Case, check_sentence


def _check_composition(case: Case, word: str, other: Callable[[Case, Schedule], Any], *, first: bool) -> None:
    """Check that the step has the same effect after another primitive (``first``), or before it, or that this is refused."""
    schedule = case.begin(plain=first)
    actions: list[tuple[str, Callable[[], Any]]] = [
        (f"the step after {word}()" if first else "the step", partial(case.step, schedule)),
        ("what comes after it", partial(case.finish, schedule)),
    ]
    if first and case.example.before is not None:
        actions.insert(0, (f"what comes before it, after {word}()", partial(case.example.before, schedule)))
    actions.insert(0 if first else 2, (f"{word}() {'alone' if first else 'after the step'}", partial(other, case, schedule)))
    for what, action in actions:
        if not _is_accepted(case, schedule, what, action):
            return
    try:
        case.compare(case.make_schedule().mod, schedule.mod, f"with {word}() {'before' if first else 'after'} the step")
    except SlapoError as error:  # a model may also say when it runs that the two do not go together
        check_sentence(error, f"{word}() {'before' if first else 'after'} the step")


def _is_accepted(case: Case, schedule: Schedule, what: str, action: Callable[[], Any]) -> bool:
    """Return the result of ``Case.takes``. Of several steps the first may have been taken, so the model is not compared."""
    if what.startswith("what comes"):
        try:
            action()
        except SlapoError:
            return False
        return True
    return case.accepts(schedule, what, action)


def _trace(case: Case, schedule: Schedule) -> None:
    schedule.trace()


def _checkpoint(case: Case, schedule: Schedule) -> None:
    at = case.at(schedule)
    if "checkpoint" in case.registry.names("primitive"):
        at.apply("checkpoint")
    elif type(at.mod).forward is not nn.Module.forward:
        wrap_forward(at.mod, _call_with_recomputation)


def _call_with_recomputation(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(call, *args, use_reentrant=False, **kwargs) if torch.is_grad_enabled() else call(*args, **kwargs)


COMPOSITION_CHECKS: dict[str, Callable[[Case], None]] = {
    f"{word} {'before' if first else 'after'}": partial(_check_composition, word=word, other=other, first=first)
    for word, other in (("trace", _trace), ("checkpoint", _checkpoint))
    for first in (True, False)
}
"""Checks of the step after and before the primitives."""
