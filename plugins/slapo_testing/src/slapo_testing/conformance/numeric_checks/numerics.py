"""Comparison of the scheduled model's results with the unmodified model's.

They are compared in several circumstances, after a step of SGD, and for steps that change dropout masks as means of many runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from slapo_core import Schedule, SlapoError, parameter_facts, rng_state
from slapo_verify.comparison import Run, StagedModel, as_built, dense, weighted_sum

from ..examples.case import BUFFER_LABEL, Case, ConformanceError, check_sentence

COMPARED_WITH = "beside the unmodified model"


@dataclass(frozen=True)
class Circumstance:
    """Way to run a model, after other runs.

    Args:
        what: Beginning of a sentence.
        run: Runs a model.
    """

    what: str
    run: Callable[[Case, nn.Module], Run] = Case.run


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Args:
        run: The outputs and gradients.
        draws: True if the forward or backward drew random numbers.
    """

    run: Run
    draws: bool


def numerics(case: Case) -> None:
    """Check that outputs and gradients equal those of the unmodified model before the step, in all circumstances."""
    if case.example.numerics == "none":
        return
    reference, schedule = _compare_circumstances(_with_input_gradients(case), [*_circumstances(case)])
    _stages(case, reference, schedule)
    if case.example.numerics == "equal":
        compare_trained(case, reference, schedule.mod)
    if len(case.modes) > 1 and "training" not in case.example.changes:
        _compare_switched(case, reference, schedule.mod)
    if not case.training:
        _compare_circumstances(replace(case, seed=7), [Circumstance("a model of another seed ")])


def _with_input_gradients(case: Case) -> Case:
    """Return a case whose inputs require gradients, unless the unmodified model changes its inputs in place."""
    asked = replace(case, input_gradients=True)
    try:
        asked.run(asked.model())
    except Exception:
        return case
    return asked


def _compare_circumstances(case: Case, course: list[Circumstance]) -> tuple[nn.Module, Schedule]:
    """Return an unmodified and a scheduled model, after checking that they compute the same."""
    reference = case.model()
    # before the step, which may change what all compute
    expected = [_expected_result(case, each, reference) for each in course]
    _has_numbers(expected)
    schedule = case.make_schedule()
    for each, wanted in zip(course, expected, strict=True):
        if wanted is not None:
            _matches_expected(case, each, schedule.mod, wanted)
    return reference, schedule


def _has_numbers(expected: list[RunResult | None]) -> None:
    """Check that there are floating-point outputs to compare."""
    outputs = [leaf for ran in expected[:1] if ran for path, leaf in ran.run.outputs if not path.startswith(BUFFER_LABEL)]
    if not any(isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) for leaf in outputs):
        more = 'give another model, or numerics="none"'
        raise ConformanceError(f"no output of the model has floating-point numbers, so nothing is compared; {more}")


def _circumstances(case: Case) -> Iterator[Circumstance]:
    yield Circumstance("")
    yield Circumstance("the second time, ")
    yield Circumstance("with gradients accumulated, ", _accumulate_gradients)
    if not case.training:
        yield Circumstance("without gradients, ", _without_gradients)
        yield Circumstance("with inputs that are not contiguous, ", _not_contiguous)


def _compare_switched(case: Case, reference: nn.Module, model: nn.Module) -> None:
    """Check that both compute the same in the other mode, and then in this one again; a traced graph may refuse."""
    modes = ["training" if training else "evaluation" for training in (case.training, not case.training)]
    for training, what in ((not case.training, modes[0]), (case.training, " and ".join(modes))):
        each = Circumstance(f"after {what}, ")
        there = replace(case, training=training)
        wanted = _expected_result(there, each, reference.train(training))
        if wanted is None or not _matches_expected(there, each, model.train(training), wanted):
            return


def _not_contiguous(case: Case, model: nn.Module) -> Run:
    return replace(case, contiguous=False).run(model)


def _without_gradients(case: Case, model: nn.Module) -> Run:
    with torch.no_grad():
        return case.run(model)


def _accumulate_gradients(case: Case, model: nn.Module) -> Run:
    """Return the gradients of two forwards and backwards."""

    def loss(outputs: Any) -> torch.Tensor | None:
        first = weighted_sum(outputs)
        if first is not None:
            first.backward()  # type: ignore[no-untyped-call]
        args, kwargs = case.inputs()
        return weighted_sum(model(*args, **kwargs))

    return case.run(model, loss)


def _expected_result(case: Case, each: Circumstance, reference: nn.Module) -> RunResult | None:
    """Return the result of the unmodified model, or None if it does not run in this circumstance."""
    try:
        return _run_result(case, each, reference)
    except Exception:
        if not each.what:
            raise
        return None


def _matches_expected(case: Case, each: Circumstance, model: nn.Module, wanted: RunResult) -> bool:
    """Return True if the scheduled model computes the expected result, False if it refuses to run, in one sentence."""
    try:
        found = _run_result(case, each, model)
    except Exception as error:
        if not each.what:
            raise
        if isinstance(error, SlapoError):
            check_sentence(error, f"running the model {each.what.strip(', ')}")
            return False
        raise ConformanceError(f"{each.what}the model raises {type(error).__name__}, as no other does: {error}") from error
    case.same(wanted.run, found.run, each.what + COMPARED_WITH, case.keep(model))
    if found.draws and not wanted.draws:
        raise ConformanceError(f"{each.what}{COMPARED_WITH}: the forward draws random numbers, which that does not")
    return True


def _run_result(case: Case, each: Circumstance, model: nn.Module) -> RunResult:
    torch.manual_seed(2)
    before = rng_state().devices
    run = each.run(case, model)
    after = rng_state().devices
    return RunResult(run, any(not torch.equal(state, after[device]) for device, state in before.items()))


def _stages(case: Case, reference: nn.Module, schedule: Schedule) -> None:
    """Check that the pipeline stages, if there are any, compute the same as the model."""
    runs = as_built(schedule)
    if isinstance(runs, StagedModel):
        case.compare(reference, runs, f"in {runs.count} stages")


MAX_CHANGE = 0.1
"""Largest change of a number by the step of SGD."""
TOLERANCE_FACTOR = 10
"""Factor by which tolerances grow after the step, since each model has its own rounding errors."""


def compare_trained(case: Case, reference: nn.Module, model: nn.Module) -> None:
    """Check that both compute the same after the same step of SGD on the parameters with gradients in both."""
    if {"ties", "names", "values"} & {*case.example.changes}:
        return  # of parameters that are no longer the same ones, a step changes others
    mine, theirs = _backward(case, reference), _backward(case, model)
    common = mine.keys() & theirs.keys()
    largest = max((float(mine[name][1].abs().max()) for name in common if mine[name][1].numel()), default=0.0)
    rate = MAX_CHANGE / max(largest, MAX_CHANGE)
    for held in (mine, theirs):
        _descend({name: held[name] for name in common}, rate)
    wider = replace(case.example, atol=TOLERANCE_FACTOR * case.example.atol, rtol=TOLERANCE_FACTOR * case.example.rtol)
    stepped = replace(case, example=wider)
    what = "after a step of SGD, {}beside the unmodified model"
    stepped.compare(reference, model, what.format(""), case.keep(model))
    with torch.no_grad():  # where a forward may use a copy of the weights that it made before the step
        stepped.compare(reference, model, what.format("without gradients, "), case.keep(model))


def _backward(case: Case, model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return parameters and their gradients by original name."""
    torch.manual_seed(2)
    args, kwargs = case.inputs()
    total = weighted_sum(model(*args, **kwargs))
    if total is not None:
        total.backward()  # type: ignore[no-untyped-call]
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        name: (tensor, dense(tensor.grad))
        for own, tensor in model.named_parameters(remove_duplicate=False)
        if tensor.grad is not None
        for name in parameter_facts(tensor).names or (own,)
    }
    for parameter in model.parameters():
        parameter.grad = None
    return found


def _descend(held: dict[str, tuple[torch.Tensor, torch.Tensor]], rate: float) -> None:
    """Update each parameter once, under whatever names."""
    with torch.no_grad():
        for tensor, gradient in {id(tensor): (tensor, gradient) for tensor, gradient in held.values()}.values():
            tensor.sub_(gradient, alpha=rate)


RUNS = 200
"""Number of runs whose means are compared."""


def means(case: Case) -> None:
    """Check that the means of many training runs, and of the squares, are within six standard errors."""
    wanted, found = _moments(case, case.model()), _moments(case, case.make_schedule().mod)
    for (path, mean, error), (_, other, error_of_other) in zip(wanted, found, strict=True):
        allowed = 6 * (error.square() + error_of_other.square()).sqrt() + case.example.atol
        if bool(((mean - other).abs() > allowed).any()):
            apart = float(((mean - other).abs() / allowed).max()) * 6
            raise ConformanceError(f"the mean of {path} over {RUNS} runs in training is {apart:.1f} standard errors off")


def _moments(case: Case, model: nn.Module) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    torch.manual_seed(2)
    runs = [case.run(model).outputs for _ in range(RUNS)]
    found = []
    for index, (path, leaf) in enumerate(runs[0]):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not path.startswith(BUFFER_LABEL):
            values = torch.stack([run[index][1] for run in runs]).double()
            for what, numbers in ((f"output{path}", values), (f"the squares of output{path}", values.square())):
                found.append((what, numbers.mean(0), numbers.std(0) / math.sqrt(RUNS)))
    return found
