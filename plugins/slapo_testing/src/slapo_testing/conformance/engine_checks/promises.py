"""Checks of a dialect's contracts on one example, run on each rank."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from slapo_core import BuildError, Engine

from ..examples.argument_copies import copy_containers, is_unchanged
from ..examples.case import ConformanceError, check_sentence
from ..examples.examples import EngineExample, RefusedOption
from ..examples.model_snapshot import Snapshot, first_of
from .checkpoints import background, checkpoint, damage
from .engine_case import EngineCase
from .evaluation import evaluation


def refusals(case: EngineCase) -> None:
    """Check that wrong options are refused by a ``BuildError`` of one sentence, and that nothing is built."""
    unknown = RefusedOption("no_such_option", {**case.example.options, "no_such_option": 1})
    precision = RefusedOption("fp12", {**case.example.options, "precision": "fp12"})
    for refused in (*case.example.refused, unknown, precision):
        _refuse(case, refused)
    _builds_without_optimizer(case)


def _refuse(case: EngineCase, refused: RefusedOption) -> None:
    changed = {key: value for key, value in refused.options.items() if case.example.options.get(key) != value}
    what = f"build({case.name!r}, {', '.join(f'{key}={value!r}' for key, value in changed.items())})"
    schedule = case.schedule()
    before, threads = Snapshot(schedule), threading.active_count()
    try:
        engine = case.build(schedule, refused.options)
    except Exception as error:
        if isinstance(error, BuildError):
            check_sentence(error, what)
        if not isinstance(error, BuildError) or not re.search(refused.match, str(error)):
            raise ConformanceError(
                f"{what} is refused by the {type(error).__name__} {str(error)!r}, not by a BuildError with {refused.match!r}"
            ) from error
    else:
        engine.close()
        raise ConformanceError(f"{what} builds an engine; it is to be refused with {refused.match!r}")
    if (found := before.differences(Snapshot(schedule))) or threading.active_count() > threads:
        raise ConformanceError(f"after {what} was refused, {first_of(found) or 'a thread goes on'}")
    if case.example.ranks == 1:
        case.build(schedule, case.example.options).close()  # it can still be built


def _builds_without_optimizer(case: EngineCase) -> None:
    """Check that ``optimizer=None`` builds an engine that only evaluates, or raises a ``BuildError``."""
    what = f"build({case.name!r}, optimizer=None)"
    try:
        with case.engine(options={**case.example.options, "optimizer": None}) as engine:
            found = case.evaluate(engine, 0)
    except BuildError as error:
        check_sentence(error, what)
    except ConformanceError:
        raise
    except Exception as error:
        raise ConformanceError(f"{what} raises {type(error).__name__}, and is no BuildError: {error}") from error
    else:
        case.equal(found, case.unmodified_loss(case.model(), 0), f"eval_batch() after {what}")


def steps(case: EngineCase) -> None:
    """Check that the losses of training equal those of the unmodified model."""
    with case.engine() as engine:
        _train(case, engine, case.losses(case.example.options), "")


def _train(case: EngineCase, engine: Engine, losses: list[float], how: str) -> None:
    for step, expected in enumerate(losses):
        batch = case.batch(step)
        given = copy_containers(batch, clone=True)
        loss = engine.train_batch(**batch)
        if not is_unchanged(batch, given):
            raise ConformanceError("train_batch() changes the batch that it is given")
        if loss.shape != () or loss.requires_grad:
            raise ConformanceError(f"train_batch() gives a loss of shape {tuple(loss.shape)}, not a detached number")
        case.equal(float(loss), expected, f"the loss of step {step + 1}{how}")


def options(case: EngineCase) -> None:
    """Check that ``microbatches`` and ``clip`` have their common meaning, or are refused."""
    if "clip" not in case.example.options:
        _means_the_same(case, "clip", _half_of_the_norm(case))
    size = min(len(value) for value in case.batch(0).values())
    if "microbatches" not in case.example.options and size % 2 == 0:
        _means_the_same(case, "microbatches", 2)


def _half_of_the_norm(case: EngineCase) -> float:
    """Return half of the norm of the first gradient."""
    model = case.model()
    case.backward(model, 0)
    return float(nn.utils.clip_grad_norm_(model.parameters(), float("inf"))) / 2


def _means_the_same(case: EngineCase, name: str, value: Any) -> None:
    changed = {**case.example.options, name: value}
    what = f"build({case.name!r}, {name}={value:.4g})"
    try:
        engine = case.build(case.schedule(), changed)
    except BuildError as error:
        return check_sentence(error, what)
    try:
        _train(case, engine, case.losses(changed), f" after {what}")
    finally:
        engine.close()


def shutdown(case: EngineCase) -> None:
    """Check that ``close`` ends threads, can be called twice, and allows another engine."""
    expected = case.losses(case.example.options)
    threads = {*threading.enumerate()}
    for which in ("the first", "the second"):
        engine = case.build(case.schedule(), case.example.options)
        case.equal(float(engine.train_batch(**case.batch(0))), expected[0], f"the loss of {which} engine of a process")
        engine.close()
        engine.close()
    if left := sorted(thread.name for thread in {*threading.enumerate()} - threads):
        raise ConformanceError(f"after close() the thread {left[0]!r} goes on")


CHECKS: dict[str, Callable[[EngineCase], None]] = {
    "refusals": refusals,
    "steps": steps,
    "options": options,
    "eval": evaluation,
    "checkpoint": checkpoint,
    "damaged": damage,
    "background": background,
    "close": shutdown,
}
"""Checks that run on each example of a dialect."""


def on_rank(check: str, name: str, example: EngineExample, folder: str) -> None:
    """Run one check on one of the processes."""
    CHECKS[check](EngineCase(name, example, folder))
