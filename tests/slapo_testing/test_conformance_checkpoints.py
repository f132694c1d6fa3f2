"""The conformance kit on dialects: faults of evaluation and of checkpoints are caught by their checks."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slapo_core import hookimpl

from .test_conformance_engines import EXAMPLE, LoopEngine, Saved, dialect_of, dialects_in, failing

pytestmark = pytest.mark.multiproc


@dialect_of
class Learning(LoopEngine):
    """Trains in evaluation."""

    def eval_batch(self, **batch: Any) -> torch.Tensor:
        return self.train_batch(**batch)


@dialect_of
class StaysInEvaluation(LoopEngine):
    """Goes on in evaluation mode."""

    def train_batch(self, **batch: Any) -> torch.Tensor:
        mode = self.module.training
        loss = super().train_batch(**batch)
        self.module.train(mode)
        return loss


@dialect_of
class EvaluatesInTraining(LoopEngine):
    """Has the wrong mode."""

    def eval_batch(self, **batch: Any) -> torch.Tensor:
        self.module.eval()
        self.module.drop.train()  # which drops nothing
        with torch.no_grad():
            return self._loss(**batch)


@dialect_of
class EvaluatesWithGradients(LoopEngine):
    """Keeps what nobody needs."""

    def eval_batch(self, **batch: Any) -> torch.Tensor:
        self.module.eval()
        return self._loss(**batch).detach()


@dialect_of
class LeavesGradients(LoopEngine):
    """Adds to the next step."""

    def eval_batch(self, **batch: Any) -> torch.Tensor:
        self.module.up.bias.grad = torch.ones(8)
        return super().eval_batch(**batch)


@dialect_of
class LeavesTheGraph(LoopEngine):
    """Gives no number."""

    def eval_batch(self, **batch: Any) -> torch.Tensor:
        return super().eval_batch(**batch).requires_grad_()


@dialect_of
class ForgetsMomentum(LoopEngine):
    """Loads half of it."""

    def load(self, path: Any) -> Any:
        before = copy.deepcopy(self.optimizer.state_dict())
        extra = super().load(path)
        self.optimizer.load_state_dict(before)
        return extra


@dialect_of
class ForgetsBuffers(LoopEngine):
    """Loads parameters alone."""

    def load(self, path: Any) -> Any:
        before = {name: tensor.clone() for name, tensor in self.module.named_buffers()}
        extra = super().load(path)
        self.module.load_state_dict(before, strict=False)
        return extra


@dialect_of
class TakesPathsAlone(LoopEngine):
    """Knows no strings."""

    def save(self, path: Any, **options: Any) -> Saved:
        return super().save(path.absolute(), **options)


@dialect_of
class SavesOnce(LoopEngine):
    """Keeps the first."""

    def save(self, path: Any, **options: Any) -> Saved:
        return super().save("/dev/null" if Path(path).exists() else path, **options)


@dialect_of
class LoadsBeforeItLooks(LoopEngine):
    """Has changed the model when it finds the second file damaged."""

    def save(self, path: Any, *, extra: Any = None, wait: bool = True) -> Saved:
        Path(path).mkdir(exist_ok=True)
        torch.save(self.module.state_dict(), Path(path, "model"))
        return super().save(Path(path, "all"), extra=extra, wait=wait)

    def load(self, path: Any) -> Any:
        if Path(path, "model").exists():
            self.module.load_state_dict(torch.load(Path(path, "model")))
        return super().load(Path(path, "all"))


@dialect_of
class WritesLate(LoopEngine):
    """Writes what there is later."""

    def save(self, path: Any, *, extra: Any = None, wait: bool = True) -> Saved:
        return Saved(self.state(), extra, path) if not wait else super().save(path, extra=extra)


@dialect_of
class ForgetsExtra(LoopEngine):
    """Gives nothing back."""

    def load(self, path: Any) -> None:
        super().load(path)


@dialect_of
class ChangesFirst(LoopEngine):
    """Changes weights before it looks."""

    def load(self, path: Any) -> Any:
        with torch.no_grad():
            self.module.up.weight.zero_()
        return super().load(path)


@dialect_of
class LoadsNothing(LoopEngine):
    """Takes no checkpoint for one."""

    def load(self, path: Any) -> Any:
        return super().load(path) if Path(path).exists() else None


@hookimpl
def slapo_dialects() -> dict[str, Any]:
    return dialects_in(globals())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "checks", "sentence"),
    [
        ("learning", {"eval", "checkpoint", "damaged", "refusals"}, "eval_batch() changes parameters"),
        ("stays_in_evaluation", {"eval"}, "eval_batch() changes the training mode of modules"),
        ("forgets_momentum", {"checkpoint", "background"}, "the loss 2 steps after load() is"),
        ("writes_late", {"background"}, "the loss 1 steps after load() of what save(extra, wait) wrote is"),
        ("forgets_extra", {"background"}, "load() gives back None, and save() was given extra={'next': 2"),
        ("changes_first", {"checkpoint", "damaged"}, "the loss 1 steps after save() and a load() that was refused is"),
        ("loads_nothing", {"checkpoint"}, "load() of a folder that is not there raises nothing"),
        ("evaluates_in_training", {"eval"}, "eval_batch() runs a Dropout in training mode"),
        ("evaluates_with_gradients", {"eval"}, "eval_batch() runs a Net with gradients"),
        ("leaves_gradients", {"eval"}, "eval_batch() changes the gradient of 'up.bias'"),
        ("leaves_the_graph", {"eval"}, "eval_batch() gives a loss that requires gradients"),
        ("forgets_buffers", {"checkpoint"}, "eval_batch() after load() is"),
        ("takes_paths_alone", {"checkpoint"}, "AttributeError: 'str' object"),
        ("saves_once", {"checkpoint"}, "eval_batch() after load() is"),
        ("loads_before_it_looks", {"damaged"}, "eval_batch() after a load() that failed, as the file 'all' is damaged, is"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_fault_is_caught_by_its_check(name: str, checks: set[str], sentence: str) -> None:
    found = failing(name, replace(EXAMPLE, plugins=(__name__,)))
    assert {*found} == checks
    assert any(sentence in message for message in found.values()), found
