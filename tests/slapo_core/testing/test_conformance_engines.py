"""The conformance kit on dialects: a right one of somebody else passes, and each planted fault is caught by its check."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import BuildError, Dialect, Engine, Program, hookimpl
from slapo_core.testing.conformance import ConformanceError, EngineExample, RefusedOption, check_dialect, dialect_checks

pytestmark = pytest.mark.multiproc


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(F.relu(self.up(x))))


def batch(step: int) -> dict[str, torch.Tensor]:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
    return {"x": x, "labels": x[:, :2] * 2}


class Saved(NamedTuple):
    """What ``wait`` writes."""

    state: dict[str, Any]
    extra: Any
    path: Any

    def wait(self) -> None:
        torch.save({"state": self.state, "extra": self.extra}, self.path)


class LoopEngine(Engine):
    """A loop in one process."""

    def __init__(self, module: nn.Module, optimizer: Any, loss_fn: Any) -> None:
        self.module, self.loss_fn = module, loss_fn
        self.optimizer = optimizer(module.parameters())

    def _loss(self, labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
        return self.loss_fn(self.module(**inputs), labels)

    def train_batch(self, **batch: Any) -> torch.Tensor:
        self.module.train()
        loss = self._loss(**batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def eval_batch(self, **batch: Any) -> torch.Tensor:
        self.module.eval()
        with torch.no_grad():
            return self._loss(**batch)

    def state(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, path: Any, *, extra: Any = None, wait: bool = True) -> Saved:
        saved = Saved(copy.deepcopy(self.state()), extra, path)
        if wait:
            saved.wait()
        return saved

    def load(self, path: Any) -> Any:
        if not path.exists():
            raise BuildError(f"there is no {path}; save there first")
        found = torch.load(path)
        self.module.load_state_dict(found["state"]["model"])
        self.optimizer.load_state_dict(found["state"]["optimizer"])
        return found["extra"]


class Loop(Dialect):
    """Trains in one process, in fp32."""

    name = "loop"
    capabilities = frozenset({"precision:fp32"})
    engine: type[LoopEngine] = LoopEngine

    @classmethod
    def check(cls, program: Program, **config: Any) -> None:
        known = {"optimizer", "loss_fn", "microbatches", "precision", "clip"}
        if unknown := sorted(config.keys() - known):
            raise BuildError(f"target {cls.name!r} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
        if config["clip"]:
            raise BuildError(f"clip is {config['clip']}; target {cls.name!r} has none, give 0")
        super().check(program, **config)

    @classmethod
    def build(cls, program: Program, *, optimizer: Any = None, loss_fn: Any = None, **config: Any) -> Engine:
        return cls.engine(program.module, optimizer, loss_fn)


class _Steeper(LoopEngine):
    def train_batch(self, **batch: Any) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.051
        return super().train_batch(**batch)


class _Attached(LoopEngine):
    def train_batch(self, **batch: Any) -> torch.Tensor:
        return super().train_batch(**batch).requires_grad_()


class _Learning(LoopEngine):
    def eval_batch(self, **batch: Any) -> torch.Tensor:
        return self.train_batch(**batch)


class _StaysInEvaluation(LoopEngine):
    def train_batch(self, **batch: Any) -> torch.Tensor:
        mode = self.module.training
        loss = super().train_batch(**batch)
        self.module.train(mode)
        return loss


class _ForgetsMomentum(LoopEngine):
    def load(self, path: Any) -> Any:
        before = copy.deepcopy(self.optimizer.state_dict())
        extra = super().load(path)
        self.optimizer.load_state_dict(before)
        return extra


class _WritesLate(LoopEngine):
    def save(self, path: Any, *, extra: Any = None, wait: bool = True) -> Saved:
        return Saved(self.state(), extra, path) if not wait else super().save(path, extra=extra)


class _ForgetsExtra(LoopEngine):
    def load(self, path: Any) -> None:
        super().load(path)


class _ChangesFirst(LoopEngine):
    def load(self, path: Any) -> Any:
        with torch.no_grad():
            self.module.up.weight.zero_()
        return super().load(path)


class _LoadsNothing(LoopEngine):
    def load(self, path: Any) -> Any:
        return super().load(path) if path.exists() else None


class _KeepsThread(LoopEngine):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        threading.Thread(target=threading.Event().wait, args=(5.0,), name="left", daemon=True).start()


class _ClosesOnce(LoopEngine):
    def close(self) -> None:
        del self.module


class Steeper(Loop):
    """Has another learning rate."""

    name, engine = "steeper", _Steeper


class Attached(Loop):
    """Keeps the graph of the loss."""

    name, engine = "attached", _Attached


class Learning(Loop):
    """Trains in evaluation."""

    name, engine = "learning", _Learning


class StaysInEvaluation(Loop):
    """Goes on in evaluation mode."""

    name, engine = "stays_in_evaluation", _StaysInEvaluation


class ForgetsMomentum(Loop):
    """Loads half of it."""

    name, engine = "forgets_momentum", _ForgetsMomentum


class WritesLate(Loop):
    """Writes what there is later."""

    name, engine = "writes_late", _WritesLate


class ForgetsExtra(Loop):
    """Gives nothing back."""

    name, engine = "forgets_extra", _ForgetsExtra


class ChangesFirst(Loop):
    """Changes weights before it looks."""

    name, engine = "changes_first", _ChangesFirst


class LoadsNothing(Loop):
    """Takes no checkpoint for one."""

    name, engine = "loads_nothing", _LoadsNothing


class KeepsThread(Loop):
    """Leaves a thread."""

    name, engine = "keeps_thread", _KeepsThread


class ClosesOnce(Loop):
    """Cannot be closed twice."""

    name, engine = "closes_once", _ClosesOnce


class TakesAll(Loop):
    """Ignores what it does not know."""

    name = "takes_all"

    @classmethod
    def check(cls, program: Program, **config: Any) -> None:
        Dialect.check.__func__(cls, program, **config)  # type: ignore[attr-defined]


class RaisesAnything(Loop):
    """Refuses by a bug."""

    name = "raises_anything"

    @classmethod
    def check(cls, program: Program, **config: Any) -> None:
        if set(config) != {"optimizer", "loss_fn", "microbatches", "precision", "clip"} or config["clip"]:
            raise KeyError("no_such_option or clip")
        Dialect.check.__func__(cls, program, **config)  # type: ignore[attr-defined]


class CanNothing(Loop):
    """Does not say what it can do."""

    name, capabilities = "can_nothing", frozenset({"tensor_parallel"})


PLANTED = {"loop": "Loop", "steeper": "Steeper", "attached": "Attached", "learning": "Learning", "closes_once": "ClosesOnce"}
PLANTED |= {"forgets_momentum": "ForgetsMomentum", "keeps_thread": "KeepsThread", "takes_all": "TakesAll"}
PLANTED |= {"stays_in_evaluation": "StaysInEvaluation", "raises_anything": "RaisesAnything", "can_nothing": "CanNothing"}

PLANTED |= {"writes_late": "WritesLate", "forgets_extra": "ForgetsExtra", "changes_first": "ChangesFirst"}
PLANTED |= {"loads_nothing": "LoadsNothing"}


@hookimpl
def slapo_dialects() -> dict[str, Any]:
    return {name: f"{__name__}:{cls}" for name, cls in PLANTED.items()}


EXAMPLE = EngineExample(
    Net, batch, loss_fn=F.mse_loss, refused=[RefusedOption("clip is 1.0", {"clip": 1.0})], plugins=(__name__,)
)


def failing(name: str, *only: str) -> dict[str, str]:
    """Check to message, of those that fail."""
    found = {}
    for check in dialect_checks(name, [EXAMPLE]):
        try:
            if not only or check.name in only:
                check()
        except ConformanceError as error:
            found[check.name] = str(error)
    return found


def test_a_right_dialect_of_somebody_else_conforms() -> None:
    check_dialect("loop", [EXAMPLE])


@pytest.mark.parametrize(
    ("name", "checks", "sentence"),
    [
        ("steeper", {"steps", "eval", "checkpoint", "background"}, "the loss of step 2 is"),
        ("attached", {"steps"}, "train_batch() gives a loss of shape (), not a detached number"),
        ("learning", {"eval"}, "eval_batch() changes parameters"),
        ("stays_in_evaluation", {"eval"}, "after eval_batch() modules are in another mode in training"),
        ("forgets_momentum", {"checkpoint", "background"}, "the loss 2 steps after load() is"),
        ("writes_late", {"background"}, "the loss 1 steps after load() of what save(extra, wait) wrote is"),
        ("forgets_extra", {"background"}, "load() gives back None, and save() was given extra={'next': 2"),
        ("changes_first", {"checkpoint"}, "the loss 1 steps after save() and a load() that was refused is"),
        ("loads_nothing", {"checkpoint"}, "load() of a folder that is not there raises nothing"),
        ("keeps_thread", {"close"}, "after close() the thread 'left' goes on"),
        ("closes_once", {"close"}, "AttributeError"),
        ("takes_all", {"refusals"}, "build('takes_all', clip=1.0) builds an engine; it is to be refused with 'clip is 1.0'"),
        ("raises_anything", {"refusals"}, "is refused by the KeyError"),
        (
            "can_nothing",
            {"documented", "refusals", "steps", "eval", "checkpoint", "background", "close"},
            "do not say what it can do",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_fault_is_caught_by_its_check(name: str, checks: set[str], sentence: str) -> None:
    found = failing(name)
    assert {*found} == checks
    assert any(sentence in message for message in found.values()), found


def test_a_dialect_needs_options_that_it_refuses() -> None:
    (check,) = [each for each in dialect_checks("loop", [replace(EXAMPLE, refused=())]) if each.name == "examples"]
    with pytest.raises(ConformanceError, match="loop, examples: no example has refused="):
        check()
