"""Comparison of the scheduled model with the unmodified one, for a given task."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from slapo_core import get_logger, is_sharded

from .comparison.model_results import (
    ComparisonTask,
    ModelResults,
    autocast,
    compare,
    compute,
    gather_outputs,
    largest,
    missing_parameters,
)
from .comparison.parameter_values import added_parameters
from .comparison.report import Report
from .comparison.rounding import is_half, is_rounding_like, tolerance_of, with_dtype, with_rounding
from .comparison.staged_model import StagedModel, as_built
from .comparison.tensor_leaves import OpaqueObject
from .diagnosis.cause import ComparedModels, cause_of, step_of
from .model_setup.model_copies import copy_model
from .model_setup.model_rollback import dropout_disabled
from .ranks.failure_propagation import StrandedError
from .ranks.thread_ranks import compute_once

T = TypeVar("T")


def compare_models(models: ComparedModels, task: ComparisonTask, blame: bool) -> Report:
    """Compare the models and return the report. Collective."""
    with torch.inference_mode(False), _comparable(models, task) as notes:
        if kinds := autocast():
            notes.append(f"autocast is off in both models, for {' and '.join(kinds)}")
        return _compare_models(models, task, blame, notes)


def _compare_models(models: ComparedModels, task: ComparisonTask, blame: bool, notes: list[str]) -> Report:
    top, ranks = models.sch, models.ranks
    runs: nn.Module = ranks.run_on_all(lambda: as_built(top))
    if isinstance(runs, StagedModel):
        notes.append(f"{runs.count} stages, one after the other in one process")
    expected, task = _expected_results(models, task)
    running = _FailureFlag()
    try:
        actual = compute(runs, task, expected, ranks, running)
    except Exception as error:
        if blame and running.failed:  # on all ranks, which are in step
            _add_note(error, str(step_of(models, runs, task, expected)))
        raise
    actual, parts = gather_outputs(expected, actual, top.group)
    own, wide = list(compare(expected, actual, task.tolerance)), None
    if models.user_tolerance is None and is_half(models.reference):
        wide = _in_float32(models, task, blame)
        few = all(ranks.gather(is_rounding_like(task, expected, actual, own)))
        if own and few and wide:
            notes.append(f"{len(own)} of the tensors are further apart than rounding brings most, and the same in float32")
        own = [] if few and wide else own
        if wide is None:
            notes.append("the models do not both run in float32, where rounding would hide less")
    elif models.user_tolerance is None and any(ranks.gather(bool(own))):
        task = _measure_rounding(models, task, expected, closely=True)
        own = list(compare(expected, actual, task.tolerance))
    found = next(filter(None, models.ranks.gather(own)), None)  # of the first rank that has any; the same on all ranks
    far = models.ranks.gather(largest(expected, actual))
    furthest = max((each for each in far if each), key=lambda each: each.absolute or 0.0, default=None)
    notes += _notes_on_uncompared(task, expected, parts)
    notes += _notes_on_unmatched(models.reference, runs, task, missing_parameters(expected, actual))
    if found is None and wide is not None and not wide.ok:
        return replace(wide, notes=(*notes, "rounding hides it; this is of both models in float32"))
    if found is None:
        return Report(task.level, expected.counts(actual), (), furthest, notes=tuple(notes))
    if task.training and any(models.ranks.gather(actual.draws and not expected.draws)):
        notes.append("the scheduled model draws random numbers that the other does not: a step has fixed a dropout in it")
    try:
        known = wide.blame if wide is not None and not wide.ok else None
        cause = known or cause_of(models, runs, task, expected, actual) if blame else None
    except StrandedError as error:
        raise StrandedError(f"{error}; that happened while locating the cause of this: {found[0].message}") from error
    return Report(task.level, expected.counts(actual), tuple(found), furthest, cause, tuple(notes))


def _notes_on_uncompared(task: ComparisonTask, expected: ModelResults, parts: Sequence[str]) -> Iterator[str]:
    """Yield notes on results that were not compared."""
    if task.level != "outputs" and not any(each is not None for each in expected.run.param_grads.values()):
        yield "nothing that the unmodified model returns has gradients, of which none are compared; give loss="
    if expected.run.outputs and not any(isinstance(each, torch.Tensor) and each.numel() for _, each in expected.run.outputs):
        yield "no output has numbers in it, so that next to nothing of what is computed was compared; give other inputs"
    if unopened := [path for path, each in expected.run.outputs if isinstance(each, OpaqueObject)]:
        more = f", nor are {len(unopened) - 1} more" if unopened[1:] else ""
        yield f"output{unopened[0]} is not looked into{more}"
    if parts:
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        yield f"{parts[0]}{more} of the scheduled model is a part on each rank; they are put together here"


def _notes_on_unmatched(reference: nn.Module, runs: nn.Module, task: ComparisonTask, gone: Sequence[str]) -> Iterator[str]:
    """Yield notes on parameters and buffers that only one model has."""
    if new := sorted(added_parameters(runs)):
        yield f"the scheduled model trains {_abbreviate(new)} besides, which the unmodified one has not"
    if gone:
        what = f"it has no {_abbreviate(gone)} any more, which are not compared"
        yield f"{what}: slapo_weights.made_of says what a new one is made of"
    now = dict(runs.named_buffers())
    lost = [name for name, _ in reference.named_buffers() if name not in now] if task.training else []
    if lost:
        yield f"the scheduled model has no buffer {_abbreviate(lost)}"


def _abbreviate(names: Sequence[str]) -> str:
    """Return the first name, and the number of others."""
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if names[1:] else "")


def _expected_results(models: ComparedModels, task: ComparisonTask) -> tuple[ModelResults, ComparisonTask]:
    """Return the results of the unmodified model, and the task with rounding errors. Collective."""
    expected = _run_reference(models, lambda: compute(models.reference, task), lambda found: not found.draws)
    if models.user_tolerance is not None:
        return expected, task
    task = replace(task, tolerance=tolerance_of(models.reference, expected.run.outputs))
    return expected, _measure_rounding(models, task, expected, closely=False)


def _measure_rounding(models: ComparedModels, task: ComparisonTask, expected: ModelResults, closely: bool) -> ComparisonTask:
    """Return the task with the rounding errors of the unmodified model, if these can be measured. Collective."""

    def run() -> ComparisonTask:
        return with_rounding(task, models.reference, expected, closely)

    try:
        found = _run_reference(models, run, lambda _: not expected.draws)
    except StrandedError:
        raise
    except Exception:  # on all ranks; its forward may fix a type
        return task
    return replace(task, tolerance=found.tolerance, rounded=found.rounded)


def _run_reference(models: ComparedModels, run: Callable[[], T], is_for_all: Callable[[T], bool]) -> T:
    """Run the unmodified model, once for ranks that are threads where it is the same. Collective."""
    if models.first or any(is_sharded(each) for each in models.reference.parameters()):  # it may meet the others while it runs
        return models.ranks.run_on_all(run)
    return compute_once(run, is_for_all, models.ranks)


def _in_float32(models: ComparedModels, task: ComparisonTask, blame: bool) -> Report | None:
    """Return the report for both models in float32, where rounding hides less; None if they do not run so. Collective."""

    def models_in_float32() -> ComparedModels:
        sch, reference = copy_model(models.sch), copy_model(models.reference).float()
        sch.mod.float()
        return models._replace(reference=reference, sch=sch, in_float32=True)

    try:
        return _compare_models(models.ranks.run_on_all(models_in_float32), with_dtype(task, torch.float32), blame, [])
    except StrandedError:
        raise
    except Exception:  # on all ranks; a step may have fixed the type
        return None


@contextmanager
def _comparable(models: ComparedModels, task: ComparisonTask) -> Iterator[list[str]]:
    """Disable dropout in a ``with`` block if the masks of both models cannot be equal; yields the notes."""
    if not task.training:
        yield ["evaluation mode: dropout is off, and is not compared"]
        return
    sharded = any(is_sharded(each) for each in models.sch.mod.parameters())
    if not any(models.ranks.gather(sharded)):
        yield ["training mode: both models draw from one random state"]
        return
    with dropout_disabled(models.reference, models.sch.mod) as count:
        what = f"{count} dropouts of both models are off, as shards draw other masks than the whole" if count else "no dropout"
        yield [f"training mode: {what}"]


def _add_note(error: Exception, text: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        get_logger().error("%s", text)


class _FailureFlag:
    """Around what all ranks run together."""

    failed = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.failed = isinstance(error, Exception) and not isinstance(error, StrandedError)
