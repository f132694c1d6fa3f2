"""Checks of a scheduled model under autocast and in bfloat16."""

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
RELATIVE_TOLERANCE = 2e-2
"""Relative difference allowed in bfloat16, to the number and to its tensor."""
ROUNDING_FACTOR = 6
"""Further difference allowed, in multiples of the unmodified model's own rounding error."""


def autocast(case: Case) -> None:
    """Check that under autocast the scheduled model computes the same, in the same dtypes; it may refuse."""
    _check(replace(case, training=False), "under autocast", torch.autocast("cpu", HALF))


def bfloat16(case: Case) -> None:
    """Check that in bfloat16 the scheduled model computes the same; it may refuse."""
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
        model = case.make_schedule().mod
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
    noise = rounding_errors(exact, wanted)
    tolerance = Tolerance(case.example.atol, max(RELATIVE_TOLERANCE, case.example.rtol), RELATIVE_TOLERANCE, noise)
    common_buffers(wanted, found)
    case.keep(model)(wanted, found)
    wanted.loss = found.loss = None  # a sum of all of them, in which errors may or may not be opposed
    for difference in differences(wanted, found, tolerance):
        raise ConformanceError(f"{what}: {difference.message}")


def rounding_errors(exact: Run, rounded: Run) -> dict[str, float]:
    """Return the allowed difference of each result, in multiples of the rounding error of an unmodified run."""
    apart = differences(_to_float64(exact), _to_float64(rounded), Tolerance(0.0, 0.0))
    return {each.what: ROUNDING_FACTOR * each.absolute for each in apart if each.absolute is not None}


def _to_float64(run: Run) -> Run:
    """Return the same numbers in float64."""

    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def of(leaves: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(path, wide(leaf)) for path, leaf in leaves]

    grads = {name: wide(grad) for name, grad in run.param_grads.items()}
    return Run(of(run.outputs), wide(run.loss), of(run.input_grads), grads)
