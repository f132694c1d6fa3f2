"""Whether a scheduled model is right in the types that models train in, too: under autocast, and in bfloat16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slapo_core import SlapoError
from slapo_verify.comparison import Run, Tolerance, differences

from ..examples.case import Case, ConformanceError, check_sentence, common_buffers

HALF = torch.bfloat16
NEAR = 2e-2
"""How far apart numbers in bfloat16 may be, relative to themselves and to their tensor."""
ROUNDED = 6
"""How many times as far as the unmodified model is from itself in full precision they may be besides."""


def autocast(case: Case) -> None:
    """Under autocast the scheduled model computes what the unmodified one does, in the same types; it may refuse."""
    _check(replace(case, training=False), "under autocast", torch.autocast("cpu", HALF))


def half(case: Case) -> None:
    """In bfloat16 the scheduled model computes what the unmodified one does; it may refuse."""
    _check(replace(case, training=False, dtype=HALF), "in bfloat16", nullcontext())


def _check(case: Case, how: str, context: AbstractContextManager[Any]) -> None:
    if case.example.numerics not in ("equal", "outputs"):
        return
    try:
        with context:
            wanted = _run(case, case.model())
    except Exception:  # the unmodified model's own: it does not run so
        return
    try:
        model = case.scheduled().mod
        with context:
            found = _run(case, model)
    except SlapoError as error:
        return check_sentence(error, f"running it {how}")
    except Exception as error:
        raise ConformanceError(f"{how} the model raises {type(error).__name__}: {error}") from error
    _compare(replace(case, dtype=None), model, wanted, found, how)


def _run(case: Case, model: nn.Module) -> Run:
    torch.manual_seed(3)
    return case.run(model)


def _compare(case: Case, model: nn.Module, wanted: Run, found: Run, what: str) -> None:
    exact = _run(case, case.model())
    apart = differences(_wide(exact), _wide(wanted), Tolerance(0.0, 0.0))
    noise = {each.what: ROUNDED * each.absolute for each in apart if each.absolute is not None}
    tolerance = Tolerance(case.example.atol, max(NEAR, case.example.rtol), NEAR, noise)
    common_buffers(wanted, found)
    case.keep(model)(wanted, found)
    wanted.loss = found.loss = None  # a sum of all of them, in which errors may or may not be opposed
    for difference in differences(wanted, found, tolerance):
        raise ConformanceError(f"{what}: {difference.message}")


def _wide(run: Run) -> Run:
    """The same numbers in float64."""

    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def of(leaves: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(path, wide(leaf)) for path, leaf in leaves]

    grads = {name: wide(grad) for name, grad in run.param_grads.items()}
    return Run(of(run.outputs), wide(run.loss), of(run.input_grads), grads)
