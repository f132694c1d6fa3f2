"""Checks of a dialect's contracts on one example, run on each rank."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import nn

from slapo_core import BuildError, Engine

from ..examples.case import ConformanceError, check_sentence
from ..examples.examples import EngineExample, RefusedOption
from ..examples.model_snapshot import Snapshot, copy_containers, first_of, is_unchanged
from .checkpoints import background, checkpoint, damage
from .engine_case import EngineCase


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
            other = f"the {type(error).__name__} {str(error)!r}"
            raise ConformanceError(f"{what} is refused by {other}, not by a BuildError with {refused.match!r}") from error
    else:
        engine.close()
        raise ConformanceError(f"{what} builds an engine; it should be refused with {refused.match!r}")
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
        raise ConformanceError(f"{what} raises {type(error).__name__}, not a BuildError: {error}") from error
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
    with closing(engine):
        _train(case, engine, case.losses(changed), f" after {what}")


def evaluation(case: EngineCase) -> None:
    """Check that ``eval_batch`` returns the loss in evaluation mode, without gradients, and does not affect training."""
    with case.engine() as engine:
        modes: list[bool] = []
        for step, (expected, model) in enumerate(case.reference(case.example.options)):
            trained = float(engine.train_batch(**case.batch(step)))
            case.equal(trained, expected, f"the loss of step {step + 1}, between evaluations")
            now = [module.training for module in engine.module.modules()]
            if modes not in ([], now):
                raise ConformanceError("eval_batch() changes the training mode of modules")
            modes = now
            case.equal(_evaluate(case, engine, step), case.unmodified_loss(model, step), f"eval_batch() after step {step + 1}")


def _evaluate(case: EngineCase, engine: Engine, step: int) -> float:
    """Return the loss of a call, which must change nothing."""
    before = _parameters(engine.module)
    with _record_modes(engine.module) as seen:
        loss = engine.eval_batch(**case.batch(step))
    for what in ("in training mode", "with gradients"):
        if step > 0 and what in seen:  # before its first evaluation an engine may trace its model
            raise ConformanceError(f"eval_batch() runs {seen[what]} {what}")
    if loss.requires_grad:
        raise ConformanceError("eval_batch() gives a loss that requires gradients, not a number")
    for name, (value, gradient) in _parameters(engine.module).items():
        if not torch.equal(value, before[name][0]):
            raise ConformanceError("eval_batch() changes parameters")
        if not _same(gradient, before[name][1]):
            raise ConformanceError(f"eval_batch() changes the gradient of {name!r}")
    return float(loss)


def _parameters(module: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the present values and gradients."""
    return {
        name: (parameter.detach().clone(), None if parameter.grad is None else parameter.grad.detach().clone())
        for name, parameter in module.named_parameters()
    }


def _same(gradient: torch.Tensor | None, before: torch.Tensor | None) -> bool:
    return gradient is before if gradient is None or before is None else torch.equal(gradient, before)


@contextmanager
def _record_modes(model: nn.Module) -> Iterator[dict[str, str]]:
    """Record the modules that run in training mode or with gradients, in a ``with`` block."""
    seen: dict[str, str] = {}

    def look(module: nn.Module, _: Any) -> None:
        if module.training:
            seen.setdefault("in training mode", f"a {type(module).__name__}")
        if torch.is_grad_enabled():
            seen.setdefault("with gradients", f"a {type(module).__name__}")

    handles = [module.register_forward_pre_hook(look) for module in model.modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


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
