"""Cause of a difference: the step, the first module, the parameter, and what it looks like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core import Schedule, ScheduleError, Step

from ..comparison.equivalence import Tolerance, of_named
from ..comparison.model_results import Computed, Task, compare, compute, numbers, put_together
from ..comparison.report import Blame
from ..comparison.staged_model import Staged
from ..model_setup.meta_values import fill_scheduled
from ..model_setup.step_replay import replay
from ..ranks.failure_propagation import Ranks, StrandedError
from . import hints
from .module_outputs import differing, outputs_of
from .step_bisection import steps_to_blame


class Models(NamedTuple):
    """Models to compare.

    Args:
        reference: The model as it was.
        sch: The schedule as it is.
        fresh: Makes a schedule of a copy of the reference.
        steps: What was done between them.
        given: The tolerance that the user has given.
        ranks: Those that verify.
        first: Number of steps before these.
        in_float32: Whether all copies are turned into that.
        unknown: Why the steps are not those that were taken.
    """

    reference: nn.Module
    sch: Schedule
    fresh: Callable[[], Schedule]
    steps: Sequence[Step]
    given: Tolerance | None
    ranks: Ranks
    first: int = 0
    in_float32: bool = False
    unknown: str | None = None

    def after(self, numbers: Sequence[int]) -> Schedule:
        """A fresh copy, after some of the steps.

        Raises:
            ScheduleError: they cannot be taken again, or not without those that are left out.
        """
        sch = replay(self.fresh(), [self.steps[number] for number in numbers])
        fill_scheduled(sch, self.reference)
        if self.in_float32:
            sch.mod.float()
        return sch


def _steps(
    models: Models, runs: nn.Module, task: Task, expected: Computed, is_wrong: Callable[[Computed], bool]
) -> tuple[list[int], list[int], str | None]:
    """Numbers of the steps to blame, of those before them, and why none is known. Collective."""
    steps = models.steps

    def right(numbers: Sequence[int]) -> bool:
        try:
            again = models.ranks.alike(lambda: models.after(numbers))
            wrong = is_wrong(compute(again.mod, task, expected, models.ranks))
        except StrandedError:
            raise
        except Exception:  # of steps without those they need, a model may not even run
            wrong = True
        return not any(models.ranks.gather(wrong))

    if models.unknown:
        return [], [], models.unknown
    try:
        if not right([]):
            if any(torch.isnan(each).any() for each in numbers(expected)):
                return [], [], "the unmodified model has NaN, which is equal to nothing"
            return [], [], "the unmodified model differs from itself: it draws random numbers, or keeps a state"
        if not steps:
            return [], [], "no step was taken"
        if not right(range(len(steps))):
            return *steps_to_blame(steps, right), None
        if isinstance(runs, Staged):
            return [], [], "the model is right before it is cut into stages: the cuts are to blame, or what cuts"
        return [], [], "the same steps on a fresh copy are right: something else has changed the model"
    except ScheduleError as error:
        return [], [], str(error)


def _named(models: Models, number: int) -> str:
    """A step, with its number in the journal."""
    return f"{number + 1 + models.first}: {models.steps[number]}"


def step_of(models: Models, runs: nn.Module, task: Task, expected: Computed) -> Blame:
    """The step alone, for a model that does not even run. Collective."""
    suspects, _, unknown = _steps(models, runs, task, expected, lambda computed: False)
    return Blame(_named(models, suspects[0]) if suspects else None, unknown=unknown)


def cause_of(models: Models, runs: nn.Module, task: Task, expected: Computed, actual: Computed) -> Blame:
    """All that is to blame of what differs. Collective.

    Args:
        models: What is compared.
        runs: What runs of the schedule.
        task: What was done.
        expected: By the unmodified model.
        actual: By the other one.
    """

    def differs(computed: Computed) -> bool:
        found, _ = put_together(expected, computed, models.sch.group)
        return any(True for _ in compare(expected, found, task.tolerance))

    suspects, before, unknown = _steps(models, runs, task, expected, differs)
    module, values = _first_module(models, runs, task, before)
    what, parameters = _wrong_parameters(models, task, expected, actual)
    if what == "update" and module is None and hints.is_split(models.sch.mod):
        hint: str | None = hints.OF_UPDATES
    else:
        hint = _hint(models, task, expected, actual, values, parameters)
    step = None
    if suspects:  # a module that is known to be wrong itself tells which
        number = next((each for each in reversed(suspects) if hint and models.steps[each].path == module), suspects[0])
        step = _named(models, number)
    return Blame(step, module, next(iter(parameters), None), hint, unknown)


Values = tuple[torch.Tensor, torch.Tensor] | None


def _first_module(models: Models, runs: nn.Module, task: Task, before: Sequence[int]) -> tuple[str | None, Values]:
    """Path of the first module whose output differs, and was right before the step to blame; with what was expected."""

    def seen(model: nn.Module) -> Any:
        return models.ranks.alike(lambda: outputs_of(model, lambda: compute(model, task)))

    expected, actual = seen(models.reference), seen(runs)
    so_far = models.after(before)
    usual = set(differing(expected, seen(so_far.mod), task.tolerance))
    differs = [path for path in differing(expected, actual, task.tolerance) if path not in usual]
    found = next((path for path in differs if not _is_summed_outside(models.sch.mod, path)), None)
    named = models.ranks.gather(found)
    path = next((each for each in named if each is not None), None)
    pairs = [next((tensors[0] for at, _, tensors in run if at == path and tensors), None) for run in (expected, actual)]
    one, other = pairs
    return path, None if one is None or other is None else (one, other)


def _is_summed_outside(model: nn.Module, path: str) -> bool:
    """Return whether an outer module has hooks, syncs say, so that this module's own output may be a part."""
    above = [path.rsplit(".", steps)[0] for steps in range(1, path.count(".") + 1)]
    own = model.get_submodule(path)
    return not own._forward_hooks and any(model.get_submodule(each)._forward_hooks for each in above)


def _wrong_parameters(models: Models, task: Task, expected: Computed, actual: Computed) -> tuple[str, list[str]]:
    """Return whether gradients differ on any rank, or else updates, and of which parameters: by the order in which the model
    lists them the last first, which are nearest to the loss, and tied ones after the others."""
    named = dict(models.reference.named_parameters(remove_duplicate=False))
    times = Counter(map(id, named.values()))
    for what, one, other in (
        ("gradient", expected.run.param_grads, actual.run.param_grads),
        ("update", expected.updates, actual.updates),
    ):
        own = [name for name in one if any(True for _ in of_named(what, {name: one[name]}, other, task.tolerance))]
        wrong = {name for names in models.ranks.gather(own) for name in names}
        if wrong:
            last_first = (name for name in reversed(named) if name in wrong)
            return what, sorted(last_first, key=lambda name: times[id(named[name])] > 1)
    return "", []


def _hint(
    models: Models, task: Task, expected: Computed, actual: Computed, values: Values, parameters: Sequence[str]
) -> str | None:
    """Return a hint from the first module that differs, or else from the gradients that do."""
    known = hints.broken_ties(models.reference, models.sch.mod) or hints.frozen(models.reference, models.sch.mod)
    if known:
        return known
    pairs = [values] if values is not None else []
    if not any(models.ranks.gather(bool(pairs))):
        gradients = [(expected.run.param_grads[name], actual.run.param_grads.get(name)) for name in parameters[:_LOOKED_AT]]
        pairs = [(one, other) for one, other in gradients if one is not None and other is not None]
        backward = True
    else:
        backward = False
    if len(set(models.ranks.gather(len(pairs)))) > 1:
        return None
    for one, other in pairs:
        comparable = one.shape == other.shape and one.is_floating_point() and bool((one - other).isfinite().all())
        if not all(models.ranks.gather(comparable)):
            continue
        hint = hints.hint_of(one, other, models.reference, task.tolerance, models.sch.group, backward)
        if found := next(filter(None, models.ranks.gather(hint)), None):
            return str(found)
    return None


_LOOKED_AT = 16
"""Gradients that are compared between ranks."""
