"""``slapo.verify`` and ``with slapo.Verify``: a scheduled model against the unmodified one."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from slapo_core.errors import UnknownNameError, VerifyError
from slapo_core.logger import get_logger
from slapo_core.parameters import facts, is_part
from slapo_core.schedule import Schedule, create_schedule
from slapo_core.testing.equivalence import Difference, Tolerance
from slapo_core.testing.stages import Staged, as_built
from slapo_core.tracing.tracers import split_inputs

from .cause import Models, cause_of, step_of
from .compare import (
    LEVELS,
    Computed,
    Loss,
    OptimizerFactory,
    Task,
    autocast,
    compare,
    compute,
    largest,
    put_together,
)
from .dropouts import switched_off
from .meeting import Ranks, StrandedError
from .once import once
from .plain_steps import sgd
from .report import Report, short
from .rounding import check_tolerance, in_wider, is_half, is_moderate, tolerance_of, with_rounding


def verify(
    reference: nn.Module,
    sch: Schedule,
    inputs: Any = None,
    level: str = "grads",
    *,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    tolerance: Tolerance | None = None,
    eval_mode: bool = True,
    blame: bool = True,
) -> Report:
    """Compare what the scheduled model computes with what the unmodified one does.

    Both run from one random state on copies of the same inputs, and are left as they were. Weights, gradients and updates are
    compared under original names, gathered over the shards' group. NaN is equal to nothing. Where something differs, the
    schedule's steps are taken again on fresh copies, to tell which broke it.

    Collective over the ranks of the schedule: every rank gives the same arguments and gets the same report.

    Args:
        reference: The unmodified model, with the weights that the schedule's had.
        sch: The schedule.
        inputs: A dict of keyword arguments, a tuple of positional ones, or the only one; default: the example inputs.
        level: ``"outputs"``; ``"grads"``: the loss and all gradients too; ``"step"``: what an optimizer's step adds to the
            weights too.
        loss: ``loss(outputs)``; default: the loss that the outputs have, or else all of them weighted.
        optimizer: ``parameters -> Optimizer`` for the step; default: SGD at a rate of 1, whose update is the gradient.
        tolerance: How far apart numbers may be; default: by the type of the parameters.
        eval_mode: Whether both run in evaluation mode, without dropout. In training mode both start from one random state;
            shards draw other masks than the whole.
        blame: Whether to look for the step, where something differs.

    Raises:
        VerifyError: there is nothing to compare: an unknown level, no inputs, no weights, or the models are one.
        Exception: whatever the models raise; with a note of the step to blame where the unmodified one runs.
    """
    top = _top(sch)
    task = _task(reference, top, inputs, level, loss, optimizer, tolerance, eval_mode)
    ranks = Ranks.of(top.mesh, top.group)
    models = Models(reference, top, lambda: fresh_schedule(reference, top), top.journal.steps, tolerance, ranks)
    return _verified(models, task, blame)


class Verify:
    """Verify the steps that are taken inside of a ``with``; ``report`` has what was found.

    Args:
        sch: The schedule; what it computes on entering is what it has to compute on leaving.
        example_inputs: As ``inputs`` of ``verify``.
        device: Where the inputs go; default: where they are.
        eval_mode: As for ``verify``.
        enable: False makes this do nothing.
        level: As for ``verify``.
        loss: As for ``verify``.
        tolerance: As for ``verify``.

    Raises:
        VerifyError: on leaving, where something differs; the message is the report.
    """

    def __init__(
        self,
        sch: Schedule,
        example_inputs: Any = None,
        device: torch.device | str | None = None,
        eval_mode: bool = True,
        enable: bool = True,
        *,
        level: str = "grads",
        loss: Loss | None = None,
        tolerance: Tolerance | None = None,
    ) -> None:
        self._top, self._enable = _top(sch), enable
        self._level, self._loss, self._tolerance = level, loss, tolerance
        self._inputs, self._device, self._eval_mode = example_inputs, device, eval_mode
        self.report: Report | None = None

    def __enter__(self) -> Verify:
        if self._enable:
            if self._device is not None:
                given = self._top.example_inputs if self._inputs is None else self._inputs
                self._inputs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda each: each.to(self._device), given)
            with torch.inference_mode(False):
                self._before = copy.deepcopy(self._top)
            self._taken = len(self._top.journal)
            _task(self._before.mod, self._top, self._inputs, self._level, self._loss, None, self._tolerance, self._eval_mode)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._enable:
            return
        before = self._before
        del self._before  # a copy of the model
        if error is not None:
            return
        task = _task(before.mod, self._top, self._inputs, self._level, self._loss, None, self._tolerance, self._eval_mode)
        steps, ranks = self._top.journal.steps[self._taken :], Ranks.of(self._top.mesh, self._top.group)
        models = Models(before.mod, self._top, lambda: copy.deepcopy(before), steps, self._tolerance, ranks, self._taken)
        self.report = _verified(models, task, True)
        self.report.check()


def _top(sch: Any) -> Schedule:
    if not isinstance(sch, Schedule):
        raise VerifyError(f"sch is {short(sch)}; give a schedule")
    return sch.get_top_schedule()


def _task(
    reference: nn.Module,
    top: Schedule,
    inputs: Any,
    level: str,
    loss: Loss | None,
    optimizer: OptimizerFactory | None,
    tolerance: Tolerance | None,
    eval_mode: bool,
) -> Task:
    if level not in LEVELS:
        raise VerifyError(str(UnknownNameError.of("level", str(level), LEVELS)))
    if not isinstance(reference, nn.Module):
        raise VerifyError(f"the reference is {short(reference)}; give the unmodified model")
    if reference is top.mod:
        raise VerifyError("the reference is the scheduled model itself; schedule a copy.deepcopy of it")
    given = top.example_inputs if inputs is None else inputs
    if given is None:
        raise VerifyError("no inputs to run the models on; give inputs, or example_inputs to create_schedule")
    for what, model in (("reference", reference), ("scheduled model", top.mod)):
        for name, each in model.named_parameters():
            if each.is_meta:
                raise VerifyError(f"{name!r} of the {what} has no values yet; load or initialise the weights first")
            if each.is_inference():
                raise VerifyError(f"{name!r} of the {what} was made in inference mode, and has no gradients; make it outside")
    shared = {id(each) for each in reference.parameters()}
    twice = [name for name, each in top.mod.named_parameters() if id(each) in shared]
    if twice:
        raise VerifyError(
            f"the reference and the scheduled model share {twice[0]!r}; schedule a copy.deepcopy of the reference"
        )
    own = reference.named_parameters(remove_duplicate=False)
    names = {known for name, parameter in own for known in (name, *facts(parameter).names)}
    lacking = [name for own in top.original_names.values() for name in own if name not in names]
    if lacking:
        raise VerifyError(f"the reference has no parameter {lacking[0]!r}; give the model that the schedule began with")
    for what, function, kind in (("loss", loss, "the outputs"), ("optimizer", optimizer, "the parameters")):
        if function is not None and not callable(function):
            raise VerifyError(f"{what} is {short(function)}; give a function of {kind}")
    if optimizer is not None and level != "step":
        raise VerifyError(f"an optimizer steps at level='step', and level is {level!r}; give that level, or no optimizer")
    if not isinstance(eval_mode, bool):
        raise VerifyError(f"eval_mode is {short(eval_mode)}; give True or False")
    check_tolerance(tolerance)
    args, kwargs = split_inputs(given)
    chosen = tolerance or tolerance_of(reference)
    return Task(args, kwargs, level, loss, optimizer or sgd, not eval_mode, chosen)


def fresh_schedule(reference: nn.Module, like: Schedule) -> Schedule:
    """A schedule without steps of a copy of the reference, on the ranks of another one."""
    return create_schedule(
        copy.deepcopy(reference), group=like.group, mesh=like.mesh, example_inputs=like.example_inputs, plugins=like.registry
    )


def _verified(models: Models, task: Task, blame: bool) -> Report:
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
    own = list(compare(expected, actual, task.tolerance))
    if models.given is None and not is_half(models.reference) and any(ranks.gather(bool(own))):
        task = replace(task, tolerance=ranks.alike(lambda: _closely(models, task, expected)))
        own = list(compare(expected, actual, task.tolerance))
    if models.given is None and _is_rounding(models, task, is_moderate(expected, actual, own), bool(own)):
        notes.append(
            f"{len(own)} of the tensors are further apart than rounding alone would bring most, and the same in float32"
        )
        own = []
    found = _of_first(models, own)
    far = models.ranks.gather(largest(expected, actual))
    furthest = max((each for each in far if each), key=lambda each: each.absolute or 0.0, default=None)
    notes += _not_compared(task, expected, parts)
    if found is None:
        return Report(task.level, expected.counts(actual), (), furthest, notes=tuple(notes))
    if task.training and any(models.ranks.gather(actual.draws and not expected.draws)):
        notes.append("the scheduled model draws random numbers that the other does not: a step has fixed a dropout in it")
    try:
        cause = cause_of(models, runs, task, expected, actual) if blame else None
    except StrandedError as error:
        raise StrandedError(f"{error}; that was in looking for what is to blame of this: {found[0].message}") from error
    return Report(task.level, expected.counts(actual), tuple(found), furthest, cause, tuple(notes))


def _not_compared(task: Task, expected: Computed, parts: Sequence[str]) -> Iterator[str]:
    """Notes of what there was to compare."""
    if task.level != "outputs" and not any(each is not None for each in expected.run.param_grads.values()):
        yield "nothing that the unmodified model returns has gradients, of which none are compared; give loss="
    if expected.run.outputs and not any(isinstance(each, torch.Tensor) and each.numel() for _, each in expected.run.outputs):
        yield "no output has numbers in it, so that next to nothing of what is computed was compared; give other inputs"
    if parts:
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        yield f"{parts[0]}{more} of the scheduled model is a part on each rank; they are put together here"


def _expected(models: Models, task: Task) -> tuple[Computed, Task]:
    """What the unmodified model computes, and how far off rounding may bring another. Collective."""

    def run() -> tuple[Computed, Task]:
        expected = compute(models.reference, task)
        if models.given is not None:
            return expected, task
        return expected, replace(task, tolerance=with_rounding(task.tolerance, models.reference, task, expected))

    if models.first or any(is_part(each) for each in models.reference.parameters()):  # it may meet the others while it runs
        return models.ranks.alike(run)
    expected, rounded = once(run, (task.args, dict(task.kwargs)), lambda found: not found[0].draws, models.ranks)
    return expected, replace(task, tolerance=rounded.tolerance)


def _closely(models: Models, task: Task, expected: Computed) -> Tolerance:
    """The tolerance, with what rounding in float32 does to the unmodified model where that can be told."""
    try:
        return with_rounding(task.tolerance, models.reference, task, expected, closely=True)
    except Exception:  # its forward may fix a type
        return task.tolerance


def _is_rounding(models: Models, task: Task, is_moderate: bool, differs: bool) -> bool:
    """Whether what differs a little in half precision is the same in float32; activations near 0 turn signs. Collective."""
    top = models.sch
    everywhere = models.ranks.gather((is_moderate, differs))
    if not is_half(models.reference) or not all(few for few, _ in everywhere) or not any(differs for _, differs in everywhere):
        return False
    wide = in_wider(task, torch.float32)

    def is_right() -> bool:
        sch, reference = copy.deepcopy(top), copy.deepcopy(models.reference).float()
        sch.mod.float()
        expected = compute(reference, wide)
        actual, _ = put_together(expected, compute(as_built(sch), wide), top.group)
        noise = with_rounding(wide.tolerance, reference, wide, expected)
        return not any(True for _ in compare(expected, actual, noise))

    try:
        return all(models.ranks.gather(models.ranks.alike(is_right)))
    except StrandedError:
        raise
    except Exception:  # on all ranks; a step may have fixed the type
        return False


@contextmanager
def _comparable(models: Models, task: Task) -> Iterator[list[str]]:
    """Dropout off for a block where the masks of both models cannot be the same; gives the notes."""
    if not task.training:
        yield ["evaluation mode: dropout is off, and is not compared"]
        return
    sharded = any(is_part(each) for each in models.sch.mod.parameters())
    if not any(models.ranks.gather(sharded)):
        yield ["training mode: both models draw from one random state"]
        return
    with switched_off(models.reference, models.sch.mod) as count:
        what = f"{count} dropouts of both models are off, as shards draw other masks than the whole" if count else "no dropout"
        yield [f"training mode: {what}"]


def _of_first(models: Models, found: list[Difference]) -> list[Difference] | None:
    """What the first rank with differences found, the same on all; None where none has any."""
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
