"""``slapo.verify`` and ``with slapo.Verify``: a scheduled model against the unmodified one."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core.agreement import gather
from slapo_core.errors import ScheduleError, UnknownNameError, VerifyError
from slapo_core.journal import Step
from slapo_core.parameters import facts, is_part
from slapo_core.schedule import Schedule, create_schedule
from slapo_core.testing.equivalence import Difference, Tolerance, of_named
from slapo_core.tracing.tracers import split_inputs

from . import hints
from .blame import steps_to_blame
from .compare import (
    LEVELS,
    Computed,
    Loss,
    OptimizerFactory,
    Task,
    autocast,
    compare,
    compute,
    in_wider,
    is_half,
    is_moderate,
    largest,
    numbers,
    put_together,
    tolerance_of,
    with_rounding,
)
from .dropouts import switched_off
from .meeting import StrandedError
from .modules import differing, outputs_of
from .once import once
from .parameter_values import Ranks
from .replay import replay
from .report import Blame, Report
from .stages import Staged, as_built


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
        Exception: whatever the models raise.
    """
    top = _top(sch)
    task = _task(reference, top, inputs, level, loss, optimizer, tolerance, eval_mode)
    return _verified(_Models(reference, top, lambda: fresh_schedule(reference, top), top.journal.steps, tolerance), task, blame)


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
        steps = self._top.journal.steps[self._taken :]
        models = _Models(before.mod, self._top, lambda: copy.deepcopy(before), steps, self._tolerance, self._taken)
        self.report = _verified(models, task, True)
        self.report.check()


class _Models(NamedTuple):
    """What is compared.

    Args:
        reference: The model as it was.
        sch: The schedule as it is.
        fresh: Makes a schedule of a copy of the reference.
        steps: What was done between them.
        given: The tolerance that the user has given.
        first: Number of steps before these.
    """

    reference: nn.Module
    sch: Schedule
    fresh: Callable[[], Schedule]
    steps: Sequence[Step]
    given: Tolerance | None
    first: int = 0


def _top(sch: Any) -> Schedule:
    if not isinstance(sch, Schedule):
        raise VerifyError(f"sch is {sch!r}; give a schedule")
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
        raise VerifyError(f"the reference is {reference!r}; give the unmodified model")
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
            raise VerifyError(f"{what} is {function!r}; give a function of {kind}")
    if tolerance is not None and not isinstance(tolerance, Tolerance):
        raise VerifyError(f"tolerance is {tolerance!r}; give a Tolerance of slapo_core.testing.equivalence")
    parts = () if tolerance is None else (tolerance.atol, tolerance.rtol, tolerance.scale)
    if not all(isinstance(each, (int, float)) and 0 <= each < math.inf for each in parts):
        raise VerifyError(f"tolerance is {tolerance!r}; give numbers from 0 on")
    args, kwargs = split_inputs(given)
    chosen = tolerance or tolerance_of(reference)
    return Task(args, kwargs, level, loss, optimizer or _sgd, not eval_mode, chosen)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def fresh_schedule(reference: nn.Module, like: Schedule) -> Schedule:
    """A schedule without steps of a copy of the reference, on the ranks of another one."""
    return create_schedule(
        copy.deepcopy(reference), group=like.group, mesh=like.mesh, example_inputs=like.example_inputs, plugins=like.registry
    )


def _verified(models: _Models, task: Task, blame: bool) -> Report:
    with torch.inference_mode(False), _comparable(models, task) as notes:
        if kinds := autocast():
            notes.append(f"autocast is off in both models, for {' and '.join(kinds)}")
        return _compared(models, task, blame, notes)


def _compared(models: _Models, task: Task, blame: bool, notes: list[str]) -> Report:
    top, ranks = models.sch, Ranks.of(models.sch.mesh, models.sch.group)
    runs: nn.Module = ranks.alike(lambda: as_built(top))
    if isinstance(runs, Staged):
        notes.append(f"{runs.count} stages, one after the other in one process")
    expected, task = _expected(models, task, ranks)
    actual = compute(runs, task, expected, ranks)
    actual, parts = put_together(expected, actual, top.group)
    own = list(compare(expected, actual, task.tolerance))
    if models.given is None and not is_half(models.reference) and any(gather(bool(own), top.mesh, top.group)):
        task = replace(task, tolerance=ranks.alike(lambda: _closely(models, task, expected)))
        own = list(compare(expected, actual, task.tolerance))
    if models.given is None and _is_rounding(models, task, is_moderate(expected, actual, own), bool(own), ranks):
        notes.append(
            f"{len(own)} of the tensors are further apart than rounding alone would bring most, and the same in float32"
        )
        own = []
    found = _of_first(top, own)
    far = gather(largest(expected, actual), top.mesh, top.group)
    furthest = max((each for each in far if each), key=lambda each: each.absolute or 0.0, default=None)
    if task.level != "outputs" and not any(each is not None for each in expected.run.param_grads.values()):
        notes.append("nothing that the unmodified model returns has gradients, of which none are compared; give loss=")
    if expected.run.outputs and not any(isinstance(each, torch.Tensor) and each.numel() for _, each in expected.run.outputs):
        notes.append("no output has numbers in it, so that next to nothing of what is computed was compared; give other inputs")
    if parts:
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        notes.append(f"{parts[0]}{more} of the scheduled model is a part on each rank; they are put together here")
    if found is None:
        return Report(task.level, expected.counts(actual), (), furthest, notes=tuple(notes))
    if task.training and any(gather(actual.draws and not expected.draws, top.mesh, top.group)):
        notes.append("the scheduled model draws random numbers that the other does not: a step has fixed a dropout in it")
    try:
        cause = _blame(models, runs, task, expected, actual, ranks) if blame else None
    except StrandedError as error:
        raise StrandedError(f"{error}; that was in looking for what is to blame of this: {found[0].message}") from error
    return Report(task.level, expected.counts(actual), tuple(found), furthest, cause, tuple(notes))


def _expected(models: _Models, task: Task, ranks: Ranks) -> tuple[Computed, Task]:
    """What the unmodified model computes, and how far off rounding may bring another. Collective."""

    def run() -> tuple[Computed, Task]:
        expected = compute(models.reference, task)
        if models.given is not None:
            return expected, task
        return expected, replace(task, tolerance=with_rounding(task.tolerance, models.reference, task, expected))

    if models.first or any(is_part(each) for each in models.reference.parameters()):  # it may meet the others while it runs
        return ranks.alike(run)
    expected, rounded = once(run, (task.args, dict(task.kwargs)), lambda found: not found[0].draws, ranks)
    return expected, replace(task, tolerance=rounded.tolerance)


def _closely(models: _Models, task: Task, expected: Computed) -> Tolerance:
    """The tolerance, with what rounding in float32 does to the unmodified model where that can be told."""
    try:
        return with_rounding(task.tolerance, models.reference, task, expected, closely=True)
    except Exception:  # its forward may fix a type
        return task.tolerance


def _is_rounding(models: _Models, task: Task, is_moderate: bool, differs: bool, ranks: Ranks) -> bool:
    """Whether what differs a little in half precision is the same in float32; activations near 0 turn signs. Collective."""
    top = models.sch
    everywhere = gather((is_moderate, differs), top.mesh, top.group)
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
        return all(gather(ranks.alike(is_right), top.mesh, top.group))
    except StrandedError:
        raise
    except Exception:  # on all ranks; a step may have fixed the type
        return False


@contextmanager
def _comparable(models: _Models, task: Task) -> Iterator[list[str]]:
    """Dropout off for a block where the masks of both models cannot be the same; gives the notes."""
    if not task.training:
        yield ["evaluation mode: dropout is off, and is not compared"]
        return
    sharded = any(is_part(each) for each in models.sch.mod.parameters())
    if not any(gather(sharded, models.sch.mesh, models.sch.group)):
        yield ["training mode: both models draw from one random state"]
        return
    with switched_off(models.reference, models.sch.mod) as count:
        what = f"{count} dropouts of both models are off, as shards draw other masks than the whole" if count else "no dropout"
        yield [f"training mode: {what}"]


def _of_first(top: Schedule, found: list[Difference]) -> list[Difference] | None:
    """What the first rank with differences found, the same on all; None where none has any."""
    return next((each for each in gather(found, top.mesh, top.group) if each), None)


def _blame(models: _Models, runs: nn.Module, task: Task, expected: Computed, actual: Computed, ranks: Ranks) -> Blame:
    top, steps = models.sch, models.steps

    def right(numbers: Sequence[int]) -> bool:
        error, differs = False, list[Difference]()
        try:
            again = ranks.alike(lambda: replay(models.fresh(), [steps[number] for number in numbers]))
            computed, _ = put_together(expected, compute(again.mod, task, expected, ranks), top.group)
            differs = list(compare(expected, computed, task.tolerance))
        except StrandedError:
            raise
        except Exception:  # of steps without those they need, a model may not even run
            error = True
        return not any(gather(error or bool(differs), top.mesh, top.group))

    step = unknown = None
    suspects: list[int] = []
    before: list[int] = []
    try:
        if not right([]):
            unknown = "the unmodified model differs from itself: it draws random numbers, or keeps a state"
            if any(torch.isnan(each).any() for each in numbers(expected)):
                unknown = "the unmodified model has NaN, which is equal to nothing"
        elif not steps:
            unknown = "no step was taken"
        elif right(range(len(steps))):
            unknown = "the same steps on a fresh copy are right: something else has changed the model"
            if isinstance(runs, Staged):
                unknown = "the model is right before it is cut into stages: the cuts are to blame, or what cuts"
        else:
            suspects, before = steps_to_blame(steps, right)
    except ScheduleError as error:
        unknown = str(error)
    module, values = _first_module(models, runs, task, before, ranks)
    parameters = _wrong_parameters(models, task, expected, actual)
    hint = _hint(models, task, expected, actual, values, parameters)
    if suspects:  # a module that is known to be wrong itself tells which
        number = next((each for each in reversed(suspects) if hint and steps[each].path == module), suspects[0])
        step = f"{number + 1 + models.first}: {steps[number]}"
    return Blame(step, module, next(iter(parameters), None), hint, unknown)


Values = tuple[torch.Tensor, torch.Tensor] | None


def _first_module(
    models: _Models, runs: nn.Module, task: Task, before: Sequence[int], ranks: Ranks
) -> tuple[str | None, Values]:
    """Path of the first module whose output differs, and was right before the step to blame; with what was expected."""

    def seen(model: nn.Module) -> Any:
        return ranks.alike(lambda: outputs_of(model, lambda: compute(model, task)))

    expected, actual = seen(models.reference), seen(runs)
    so_far = replay(models.fresh(), [models.steps[number] for number in before])
    usual = set(differing(expected, seen(so_far.mod), task.tolerance))
    differs = [path for path in differing(expected, actual, task.tolerance) if path not in usual]
    found = next((path for path in differs if not _is_summed_outside(models.sch.mod, path)), None)
    named = gather(found, models.sch.mesh, models.sch.group)
    path = next((each for each in named if each is not None), None)
    pairs = [next((tensors[0] for at, _, tensors in run if at == path and tensors), None) for run in (expected, actual)]
    one, other = pairs
    return path, None if one is None or other is None else (one, other)


def _is_summed_outside(model: nn.Module, path: str) -> bool:
    """Whether a module around it has hooks, syncs say, so that its own output may be a part."""
    above = [path.rsplit(".", steps)[0] for steps in range(1, path.count(".") + 1)]
    own = model.get_submodule(path)
    return not own._forward_hooks and any(model.get_submodule(each)._forward_hooks for each in above)


def _wrong_parameters(models: _Models, task: Task, expected: Computed, actual: Computed) -> list[str]:
    """Parameters whose gradient, or else update, differs on any rank; by the order in which the model lists them the last
    first, which are nearest to the loss, and tied ones after the others."""
    named = dict(models.reference.named_parameters(remove_duplicate=False))
    times = Counter(map(id, named.values()))
    for what, one, other in (
        ("gradient", expected.run.param_grads, actual.run.param_grads),
        ("update", expected.updates, actual.updates),
    ):
        own = [name for name in one if any(True for _ in of_named(what, {name: one[name]}, other, task.tolerance))]
        wrong = {name for names in gather(own, models.sch.mesh, models.sch.group) for name in names}
        if wrong:
            return sorted((name for name in reversed(named) if name in wrong), key=lambda name: times[id(named[name])] > 1)
    return []


def _hint(
    models: _Models, task: Task, expected: Computed, actual: Computed, values: Values, parameters: Sequence[str]
) -> str | None:
    """What is known of the first module that differs, or else of the gradients that do."""
    known = hints.broken_ties(models.reference, models.sch.mod) or hints.frozen(models.reference, models.sch.mod)
    if known:
        return known
    pairs = [values] if values is not None else []
    if not any(gather(bool(pairs), models.sch.mesh, models.sch.group)):
        gradients = [(expected.run.param_grads[name], actual.run.param_grads.get(name)) for name in parameters[:_LOOKED_AT]]
        pairs = [(one, other) for one, other in gradients if one is not None and other is not None]
        backward = True
    else:
        backward = False
    if len(set(gather(len(pairs), models.sch.mesh, models.sch.group))) > 1:
        return None
    for one, other in pairs:
        comparable = one.shape == other.shape and one.is_floating_point() and bool((one - other).isfinite().all())
        if not all(gather(comparable, models.sch.mesh, models.sch.group)):
            continue
        hint = hints.hint_of(one, other, models.reference, task.tolerance, models.sch.group, backward)
        if found := next(filter(None, gather(hint, models.sch.mesh, models.sch.group)), None):
            return str(found)
    return None


_LOOKED_AT = 16
"""Gradients that are compared between ranks."""
