"""Checks of ``eval_batch``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slapo_core import Engine

from ..examples.case import ConformanceError
from .engine_case import EngineCase


def evaluation(case: EngineCase) -> None:
    """Check that ``eval_batch`` returns the loss in evaluation mode, without gradients, and does not affect training."""
    with case.engine() as engine:
        modes: list[bool] = []
        for step, (expected, model) in enumerate(case.reference(case.example.options)):
            case.equal(
                float(engine.train_batch(**case.batch(step))), expected, f"the loss of step {step + 1}, between evaluations"
            )
            now = [module.training for module in engine.module.modules()]
            if modes not in ([], now):
                raise ConformanceError("after eval_batch() modules are in another mode in training")
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
