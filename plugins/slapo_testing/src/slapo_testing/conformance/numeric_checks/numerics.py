"""What the scheduled model computes, beside the unmodified one, in one circumstance after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from slapo_core import Schedule, SlapoError, rng_state
from slapo_verify.comparison import Run, Staged, as_built, weighted_sum

from ..examples.case import LEFT, Case, ConformanceError, check_sentence
from .training_steps import compare_trained

BESIDE = "beside the unmodified model"


@dataclass(frozen=True)
class Circumstance:
    """How a model is run, after others of it.

    Args:
        what: Begins a sentence.
        run: Runs a model.
    """

    what: str
    run: Callable[[Case, nn.Module], Run] = Case.run


@dataclass(frozen=True)
class Ran:
    """What came of it.

    Args:
        run: What was computed.
        draws: Whether the forward or backward drew random numbers.
    """

    run: Run
    draws: bool


def numerics(case: Case) -> None:
    """Outputs and gradients are those that the unmodified model had before the step, however the two are run."""
    if case.example.numerics == "none":
        return
    reference, schedule = _compared(_with_input_gradients(case), [*_course(case)])
    _stages(case, reference, schedule)
    if case.example.numerics == "equal":
        compare_trained(case, reference, schedule.mod)
    if len(case.modes) > 1 and "training" not in case.example.changes:
        _compare_switched(case, reference, schedule.mod)
    if not case.training:
        _compared(replace(case, seed=7), [Circumstance("a model of another seed ")])


def _with_input_gradients(case: Case) -> Case:
    """One whose inputs require gradients, unless the unmodified model takes none such, as it works in place of them."""
    asked = replace(case, input_gradients=True)
    try:
        asked.run(asked.model())
    except Exception:
        return case
    return asked


def _compared(case: Case, course: list[Circumstance]) -> tuple[nn.Module, Schedule]:
    """An unmodified and a scheduled model that compute the same."""
    reference = case.model()
    expected = [_expected(case, each, reference) for each in course]  # before the step, which may change what all compute
    _has_numbers(expected)
    schedule = case.scheduled()
    for each, wanted in zip(course, expected, strict=True):
        if wanted is not None:
            _found(case, each, schedule.mod, wanted)
    return reference, schedule


def _has_numbers(expected: list[Ran | None]) -> None:
    """There is something to compare."""
    outputs = [leaf for ran in expected[:1] if ran for path, leaf in ran.run.outputs if not path.startswith(LEFT)]
    if not any(isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) for leaf in outputs):
        more = 'give another model, or numerics="none"'
        raise ConformanceError(f"no output of the model has floating-point numbers, so nothing is compared; {more}")


def _course(case: Case) -> Iterator[Circumstance]:
    yield Circumstance("")
    yield Circumstance("the second time, ")
    yield Circumstance("with gradients accumulated, ", _accumulated)
    if not case.training:
        yield Circumstance("without gradients, ", _without_gradients)
        yield Circumstance("with inputs that are not contiguous, ", _not_contiguous)


def _compare_switched(case: Case, reference: nn.Module, model: nn.Module) -> None:
    """Both compute the same in the other mode, and then in this one again; a traced graph may refuse to."""
    modes = ["training" if training else "evaluation" for training in (case.training, not case.training)]
    for training, what in ((not case.training, modes[0]), (case.training, " and ".join(modes))):
        each = Circumstance(f"after {what}, ")
        there = replace(case, training=training)
        wanted = _expected(there, each, reference.train(training))
        if wanted is None or not _found(there, each, model.train(training), wanted):
            return


def _not_contiguous(case: Case, model: nn.Module) -> Run:
    return replace(case, contiguous=False).run(model)


def _without_gradients(case: Case, model: nn.Module) -> Run:
    with torch.no_grad():
        return case.run(model)


def _accumulated(case: Case, model: nn.Module) -> Run:
    """The gradients of two forwards and backwards."""

    def loss(outputs: Any) -> torch.Tensor | None:
        first = weighted_sum(outputs)
        if first is not None:
            first.backward()  # type: ignore[no-untyped-call]
        args, kwargs = case.inputs()
        return weighted_sum(model(*args, **kwargs))

    return case.run(model, loss)


def _expected(case: Case, each: Circumstance, reference: nn.Module) -> Ran | None:
    """Of the unmodified model; None where it does not run so."""
    try:
        return _ran(case, each, reference)
    except Exception:
        if not each.what:
            raise
        return None


def _found(case: Case, each: Circumstance, model: nn.Module, wanted: Ran) -> bool:
    """Whether the scheduled model computes what is wanted; it may refuse to run so, in one sentence."""
    try:
        found = _ran(case, each, model)
    except Exception as error:
        if not each.what:
            raise
        if isinstance(error, SlapoError):
            check_sentence(error, f"running the model {each.what.strip(', ')}")
            return False
        raise ConformanceError(f"{each.what}the model raises {type(error).__name__}, as no other does: {error}") from error
    case.same(wanted.run, found.run, each.what + BESIDE, case.keep(model))
    if found.draws and not wanted.draws:
        raise ConformanceError(f"{each.what}{BESIDE}: the forward draws random numbers, which that does not")
    return True


def _ran(case: Case, each: Circumstance, model: nn.Module) -> Ran:
    torch.manual_seed(2)
    before = rng_state().devices
    run = each.run(case, model)
    after = rng_state().devices
    return Ran(run, any(not torch.equal(state, after[device]) for device, state in before.items()))


def _stages(case: Case, reference: nn.Module, schedule: Schedule) -> None:
    """Where the steps make stages, these too compute what the model does."""
    runs = as_built(schedule)
    if isinstance(runs, Staged):
        case.compare(reference, runs, f"in {runs.count} stages")
