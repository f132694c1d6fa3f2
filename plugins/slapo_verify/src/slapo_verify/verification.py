"""The scheduled model beside the unmodified one, once it is known what to compare."""

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

from .comparison.equivalence import Difference
from .comparison.model_results import Computed, Task, autocast, compare, compute, largest, put_together, replaced
from .comparison.report import Report
from .comparison.rounding import in_wider, is_half, is_moderate, tolerance_of, with_rounding
from .comparison.staged_model import Staged, as_built
from .comparison.tensor_leaves import Unopened
from .diagnosis.cause import Models, cause_of, step_of
from .model_setup.dropouts import switched_off
from .model_setup.fused_parameters import new_names
from .model_setup.model_copies import copied
from .ranks.failure_propagation import StrandedError
from .ranks.shared_results import computed_once

T = TypeVar("T")


def verified(models: Models, task: Task, blame: bool) -> Report:
    """Compare. Collective."""
    with torch.inference_mode(False), _comparable(models, task) as notes:
        if kinds := autocast():
            notes.append(f"autocast is off in both models, for {' and '.join(kinds)}")
        return _compared(models, task, blame, notes)


def _compared(models: Models, task: Task, blame: bool, notes: list[str]) -> Report:
    top, ranks = models.sch, models.ranks
    runs: nn.Module = ranks.alike(lambda: as_built(top))
    if isinstance(runs, Staged):
        notes.append(f"{runs.count} stages, one after the other in one process")
    expected, task = _expected(models, task)
    running = _Running()
    try:
        actual = compute(runs, task, expected, ranks, running)
    except Exception as error:
        if blame and running.failed:  # on all ranks, which are in step
            _note(error, str(step_of(models, runs, task, expected)))
        raise
    actual, parts = put_together(expected, actual, top.group)
    own, wide = list(compare(expected, actual, task.tolerance)), None
    if models.given is None and is_half(models.reference):
        wide = _in_float32(models, task, blame)
        few = all(ranks.gather(is_moderate(task, expected, actual, own)))
        if own and few and wide:
            notes.append(f"{len(own)} of the tensors are further apart than rounding brings most, and the same in float32")
        own = [] if few and wide else own
        if wide is None:
            notes.append("the models do not both run in float32, where rounding would hide less")
    elif models.given is None and any(ranks.gather(bool(own))):
        task = _rounded(models, task, expected, closely=True)
        own = list(compare(expected, actual, task.tolerance))
    found = _of_first(models, own)
    far = models.ranks.gather(largest(expected, actual))
    furthest = max((each for each in far if each), key=lambda each: each.absolute or 0.0, default=None)
    notes += [*_not_compared(task, expected, parts), *_only_in_one(models.reference, runs, task, replaced(expected, actual))]
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
        raise StrandedError(f"{error}; that was in looking for what is to blame of this: {found[0].message}") from error
    return Report(task.level, expected.counts(actual), tuple(found), furthest, cause, tuple(notes))


def _not_compared(task: Task, expected: Computed, parts: Sequence[str]) -> Iterator[str]:
    """Notes of what there was to compare."""
    if task.level != "outputs" and not any(each is not None for each in expected.run.param_grads.values()):
        yield "nothing that the unmodified model returns has gradients, of which none are compared; give loss="
    if expected.run.outputs and not any(isinstance(each, torch.Tensor) and each.numel() for _, each in expected.run.outputs):
        yield "no output has numbers in it, so that next to nothing of what is computed was compared; give other inputs"
    if unopened := [path for path, each in expected.run.outputs if isinstance(each, Unopened)]:
        yield (
            f"output{unopened[0]} is not looked into, nor are {len(unopened) - 1} more"
            if unopened[1:]
            else (f"output{unopened[0]} is not looked into")
        )
    if parts:
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        yield f"{parts[0]}{more} of the scheduled model is a part on each rank; they are put together here"


def _only_in_one(reference: nn.Module, runs: nn.Module, task: Task, gone: Sequence[str]) -> Iterator[str]:
    """Notes of what one model alone has."""
    if new := sorted(new_names(runs)):
        yield f"the scheduled model trains {_first(new)} besides, which the unmodified one has not"
    if gone:
        yield f"it has no {_first(gone)} any more, which are not compared: slapo_weights.made_of says what a new one is made of"
    now = dict(runs.named_buffers())
    lost = [name for name, _ in reference.named_buffers() if name not in now] if task.training else []
    if lost:
        yield f"the scheduled model has no buffer {_first(lost)}"


def _first(names: Sequence[str]) -> str:
    """The first name, and how many there are besides."""
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if names[1:] else "")


def _expected(models: Models, task: Task) -> tuple[Computed, Task]:
    """Return what the unmodified model computes, and how far off rounding may bring another. Collective."""
    expected = _of_reference(models, lambda: compute(models.reference, task), lambda found: not found.draws)
    if models.given is not None:
        return expected, task
    task = replace(task, tolerance=tolerance_of(models.reference, expected.run.outputs))
    return expected, _rounded(models, task, expected, closely=False)


def _rounded(models: Models, task: Task, expected: Computed, closely: bool) -> Task:
    """The task, with what rounding does to the unmodified model where that can be told. Collective."""

    def run() -> Task:
        return with_rounding(task, models.reference, expected, closely)

    try:
        found = _of_reference(models, run, lambda _: not expected.draws)
    except StrandedError:
        raise
    except Exception:  # on all ranks; its forward may fix a type
        return task
    return replace(task, tolerance=found.tolerance, rounded=found.rounded)


def _of_reference(models: Models, run: Callable[[], T], is_for_all: Callable[[T], bool]) -> T:
    """Run the unmodified model, once for ranks that are threads where it is the same. Collective."""
    if models.first or any(is_sharded(each) for each in models.reference.parameters()):  # it may meet the others while it runs
        return models.ranks.alike(run)
    return computed_once(run, is_for_all, models.ranks)


def _in_float32(models: Models, task: Task, blame: bool) -> Report | None:
    """The same of both models in float32, where rounding hides less; None where they do not run so. Collective."""

    def wide() -> Models:
        sch, reference = copied(models.sch), copied(models.reference).float()
        sch.mod.float()
        return models._replace(reference=reference, sch=sch, in_float32=True)

    try:
        return _compared(models.ranks.alike(wide), in_wider(task, torch.float32), blame, [])
    except StrandedError:
        raise
    except Exception:  # on all ranks; a step may have fixed the type
        return None


@contextmanager
def _comparable(models: Models, task: Task) -> Iterator[list[str]]:
    """Dropout off for a block where the masks of both models cannot be the same; gives the notes."""
    if not task.training:
        yield ["evaluation mode: dropout is off, and is not compared"]
        return
    sharded = any(is_sharded(each) for each in models.sch.mod.parameters())
    if not any(models.ranks.gather(sharded)):
        yield ["training mode: both models draw from one random state"]
        return
    with switched_off(models.reference, models.sch.mod) as count:
        what = f"{count} dropouts of both models are off, as shards draw other masks than the whole" if count else "no dropout"
        yield [f"training mode: {what}"]


def _of_first(models: Models, found: list[Difference]) -> list[Difference] | None:
    """Return what the first rank with differences found, the same on all; None where none has any."""
    return next((each for each in models.ranks.gather(found) if each), None)


def _note(error: Exception, text: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        get_logger().error("%s", text)


class _Running:
    """Around what all ranks run together."""

    failed = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.failed = isinstance(error, Exception) and not isinstance(error, StrandedError)
