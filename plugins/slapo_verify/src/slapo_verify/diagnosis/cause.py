"""Cause of a difference: the step, the first module, the parameter, and a hint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from slapo_core import Schedule, ScheduleError, Step

from ..comparison.equivalence import Tolerance, named_differences
from ..comparison.model_results import ComparisonTask, ModelResults, compare, compute, gather_outputs, numbers
from ..comparison.report import Blame
from ..comparison.staged_model import StagedModel
from ..model_setup.meta_values import fill_scheduled
from ..model_setup.model_copies import replay
from ..ranks._torch_private import is_dry_run
from ..ranks.failure_propagation import Ranks, StrandedError
from . import hints
from .step_bisection import steps_to_blame


class ComparedModels(NamedTuple):
    """Models to compare.

    Args:
        reference: The model before the steps.
        sch: The present schedule.
        fresh: Makes a schedule of a copy of the reference.
        steps: Steps between the two.
        user_tolerance: Tolerance of the user, or None.
        ranks: The ranks that verify.
        first: Number of steps before these.
        in_float32: True to convert all copies to float32.
        unknown: Reason why the steps are not those that were taken.
    """

    reference: nn.Module
    sch: Schedule
    fresh: Callable[[], Schedule]
    steps: Sequence[Step]
    user_tolerance: Tolerance | None
    ranks: Ranks
    first: int = 0
    in_float32: bool = False
    unknown: str | None = None

    def schedule_after(self, numbers: Sequence[int]) -> Schedule:
        """Return the schedule of a new copy schedule_after some of the steps; they must not need the omitted ones."""
        sch = replay(self.fresh(), [self.steps[number] for number in numbers])
        fill_scheduled(sch, self.reference)
        if self.in_float32:
            sch.mod.float()
        return sch


def _steps(
    models: ComparedModels,
    runs: nn.Module,
    task: ComparisonTask,
    expected: ModelResults,
    is_wrong: Callable[[ModelResults], bool],
) -> tuple[list[int], list[int], str | None]:
    """Return the numbers of the steps to blame, those of the steps before, and why none is known. Collective."""
    steps = models.steps

    def is_right(numbers: Sequence[int]) -> bool:
        try:
            again = models.ranks.run_on_all(lambda: models.schedule_after(numbers))
            wrong = is_wrong(compute(again.mod, task, expected, models.ranks))
        except StrandedError:
            raise
        except Exception:  # of steps without those they need, a model may not even run
            wrong = True
        return not any(models.ranks.gather(wrong))

    if models.unknown:
        return [], [], models.unknown
    try:
        if not is_right([]):
            if any(torch.isnan(each).any() for each in numbers(expected)):
                return [], [], "the unmodified model has NaN, which is equal to nothing"
            return [], [], "the unmodified model differs from itself: it draws random numbers, or keeps a state"
        if not steps:
            return [], [], "no step was taken"
        if not is_right(range(len(steps))):
            return *steps_to_blame(steps, is_right), None
        if isinstance(runs, StagedModel):
            return [], [], "the model is right before it is cut into stages: the cuts are to blame, or what cuts"
        return [], [], "the same steps on a fresh copy are right: something else has changed the model"
    except ScheduleError as error:
        return [], [], str(error)


def _step_label(models: ComparedModels, number: int) -> str:
    """Return a step with its number in the journal."""
    return f"{number + 1 + models.first}: {models.steps[number]}"


def step_of(models: ComparedModels, runs: nn.Module, task: ComparisonTask, expected: ModelResults) -> Blame:
    """Return only the step to blame, for a model that does not run. Collective."""
    suspects, _, unknown = _steps(models, runs, task, expected, lambda computed: False)
    return Blame(_step_label(models, suspects[0]) if suspects else None, unknown=unknown)


def cause_of(
    models: ComparedModels, runs: nn.Module, task: ComparisonTask, expected: ModelResults, actual: ModelResults
) -> Blame:
    """Return the cause of the differences between expected and actual results. Collective."""

    def differs(computed: ModelResults) -> bool:
        found, _ = gather_outputs(expected, computed, models.sch.group)
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
        step = _step_label(models, number)
    return Blame(step, module, next(iter(parameters), None), hint, unknown)


Values = tuple[torch.Tensor, torch.Tensor] | None


def _first_module(
    models: ComparedModels, runs: nn.Module, task: ComparisonTask, before: Sequence[int]
) -> tuple[str | None, Values]:
    """Return the path of the first module whose output differs but was right before the step to blame, and both outputs."""

    def all_outputs(model: nn.Module) -> Any:
        return models.ranks.run_on_all(lambda: outputs_of(model, lambda: compute(model, task)))

    expected, actual = all_outputs(models.reference), all_outputs(runs)
    so_far = models.schedule_after(before)
    usual = set(differing_modules(expected, all_outputs(so_far.mod), task.tolerance))
    differs = [path for path in differing_modules(expected, actual, task.tolerance) if path not in usual]
    found = next((path for path in differs if not _is_summed_outside(models.sch.mod, path)), None)
    named = models.ranks.gather(found)
    path = next((each for each in named if each is not None), None)
    one, other = (next((found[0] for at, _, found in run if at == path and found), None) for run in (expected, actual))
    return path, None if one is None or other is None else (one, other)


def _is_summed_outside(model: nn.Module, path: str) -> bool:
    """Return True if an outer module has hooks, such as syncs, so that this module's own output may be a partial value."""
    above = [path.rsplit(".", steps)[0] for steps in range(1, path.count(".") + 1)]
    own = model.get_submodule(path)
    return not own._forward_hooks and any(model.get_submodule(each)._forward_hooks for each in above)


def _wrong_parameters(
    models: ComparedModels, task: ComparisonTask, expected: ModelResults, actual: ModelResults
) -> tuple[str, list[str]]:
    """Return whether gradients or updates differ on any rank, and the names of the parameters.

    The names are in reverse order of the model, nearest to the loss first; tied parameters come last.
    """
    named = dict(models.reference.named_parameters(remove_duplicate=False))
    times = Counter(map(id, named.values()))
    for what, one, other in (
        ("gradient", expected.run.param_grads, actual.run.param_grads),
        ("update", expected.updates, actual.updates),
    ):
        own = [name for name in one if any(True for _ in named_differences(what, {name: one[name]}, other, task.tolerance))]
        wrong = {name for names in models.ranks.gather(own) for name in names}
        if wrong:
            last_first = (name for name in reversed(named) if name in wrong)
            return what, sorted(last_first, key=lambda name: times[id(named[name])] > 1)
    return "", []


def _hint(
    models: ComparedModels,
    task: ComparisonTask,
    expected: ModelResults,
    actual: ModelResults,
    values: Values,
    parameters: Sequence[str],
) -> str | None:
    """Return a hint from the first module that differs, or else from the gradients that do."""
    known = hints.broken_ties(models.reference, models.sch.mod) or hints.frozen_parameter(models.reference, models.sch.mod)
    if known:
        return known
    pairs = [values] if values is not None else []
    backward = not any(models.ranks.gather(bool(pairs)))
    if backward:
        gradients = [(expected.run.param_grads[name], actual.run.param_grads.get(name)) for name in parameters[:_MAX_GRADIENTS]]
        pairs = [(one, other) for one, other in gradients if one is not None and other is not None]
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


_MAX_GRADIENTS = 16
"""Number of gradients that are compared between ranks."""


Outputs = list[tuple[str, int, list[torch.Tensor]]]
"""Path, number of the call, and output tensors, in the order in which modules returned."""


def outputs_of(model: nn.Module, run: Callable[[], Any]) -> Outputs:
    """Return the output of each module while ``run`` runs the model, without modules in compiled regions or traces.

    No module gets a first hook of its own, since some compute differently with hooks. The output of a module with hooks, such
    as syncs, is recorded after these.
    """
    paths = {module: path for path, module in model.named_modules() if path}
    found: Outputs = []
    calls: dict[str, int] = {}

    def record(module: nn.Module, args: Any, output: Any) -> None:
        if is_dry_run():  # a traced module traces itself again for a call that it has not seen
            return
        path = paths[module]
        calls[path] = calls.get(path, -1) + 1
        leaves = torch.utils._pytree.tree_leaves(output)
        found.append((path, calls[path], [each.detach().clone() for each in leaves if isinstance(each, torch.Tensor)]))

    def record_bare(module: nn.Module, args: Any, output: Any) -> None:
        if module in paths and not module._forward_hooks:
            record(module, args, output)

    handles = [register_module_forward_hook(record_bare)]
    handles += [module.register_forward_hook(record) for module in paths if module._forward_hooks]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


def differing_modules(expected: Outputs, actual: Outputs, tolerance: Tolerance) -> list[str]:
    """Return the paths of modules with other outputs, in order. Outputs of other shapes, as shards, do not count."""
    known = {(path, call): tensors for path, call, tensors in expected}
    found: dict[str, None] = {}
    for path, call, tensors in actual:
        pairs = zip(known.get((path, call), []), tensors, strict=False)
        alike = ((one, other) for one, other in pairs if one.shape == other.shape and one.dtype is other.dtype)
        if not all(bool(tolerance.accepts(one, other).all()) for one, other in alike):
            found[path] = None
    return list(found)
