"""The conformance kit on dialects: a right one of somebody else passes, and each planted fault is caught by its check."""

from __future__ import annotations

import copy
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import BuildError, Dialect, Engine, Program, hookimpl
from slapo_testing.conformance import ConformanceError, EngineExample, RefusedOption, check_dialect, dialect_checks

pytestmark = pytest.mark.multiproc


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(F.relu(self.norm(self.up(x)))))


def batch(step: int) -> dict[str, torch.Tensor]:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
    return {"x": x, "labels": x[:, :2] * 2}


class Saved(NamedTuple):
    """Handle of a save; ``wait`` writes its content."""

    state: dict[str, Any]
    extra: Any
    path: Any

    def wait(self) -> None:
        torch.save({"state": self.state, "extra": self.extra}, self.path)


class LoopEngine(Engine):
    """A loop in one process."""

    def __init__(self, module: nn.Module, optimizer: Any, loss_fn: Any, microbatches: int, clip: float) -> None:
        self.module, self.loss_fn, self.microbatches, self.clip = module, loss_fn, microbatches, clip
        self.optimizer = optimizer(module.parameters()) if optimizer else None

    def _loss(self, labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
        return self.loss_fn(self.module(**inputs), labels)

    def train_batch(self, **batch: Any) -> torch.Tensor:
        self.module.train()
        self.optimizer.zero_grad()
        losses = []
        for part in zip(*(value.chunk(self.microbatches) for value in batch.values()), strict=True):
            losses.append(self._loss(**dict(zip(batch, part, strict=True))) / self.microbatches)
            losses[-1].backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        return sum(losses).detach()

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
        if not Path(path).exists():
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
        if config["clip"] < 0:
            raise BuildError(f"clip is {config['clip']}; give 0 or more")
        super().check(program, **config)

    @classmethod
    def build(
        cls, program: Program, *, optimizer: Any = None, loss_fn: Any = None, microbatches: int = 1, clip: float = 0.0, **_: Any
    ) -> Engine:
        return cls.engine(program.module, optimizer, loss_fn, microbatches, clip)


def dialect_of(engine: type[LoopEngine]) -> type[Loop]:
    """The loop with another engine, whose name is the class's."""
    name = re.sub("(?<!^)(?=[A-Z])", "_", engine.__name__).lower()
    return type(
        engine.__name__, (Loop,), {"name": name, "engine": engine, "__doc__": engine.__doc__, "__module__": engine.__module__}
    )


def dialects_in(module: dict[str, Any]) -> dict[str, Any]:
    """Names and import paths of those that a module defines, or that it has from here."""
    found = [cls for cls in module.values() if isinstance(cls, type) and issubclass(cls, Loop)]
    return {cls.name: f"{cls.__module__}:{cls.__name__}" for cls in found}


@dialect_of
class Summed(LoopEngine):
    """Adds up what micro-batches give."""

    def _loss(self, labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
        return super()._loss(labels, **inputs) * (self.microbatches if self.module.training else 1)


@dialect_of
class IgnoresClip(LoopEngine):
    """Takes clip for nothing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args[:-1], 0.0)


@dialect_of
class NeedsOptimizer(LoopEngine):
    """Cannot do without."""

    def __init__(self, module: nn.Module, optimizer: Any, *args: Any) -> None:
        super().__init__(module, optimizer, *args)
        self.optimizer.zero_grad()


@dialect_of
class ChangesTheBatch(LoopEngine):
    """Uses it up."""

    def train_batch(self, **batch: Any) -> torch.Tensor:
        loss = super().train_batch(**batch)
        batch["x"].zero_()
        return loss


@dialect_of
class Steeper(LoopEngine):
    """Has another learning rate."""

    def train_batch(self, **batch: Any) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.051
        return super().train_batch(**batch)


@dialect_of
class Attached(LoopEngine):
    """Keeps the graph of the loss."""

    def train_batch(self, **batch: Any) -> torch.Tensor:
        return super().train_batch(**batch).requires_grad_()


@dialect_of
class KeepsThread(LoopEngine):
    """Leaves a thread."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        threading.Thread(target=threading.Event().wait, args=(5.0,), name="left", daemon=True).start()


@dialect_of
class ClosesOnce(LoopEngine):
    """Cannot be closed twice."""

    def close(self) -> None:
        del self.module


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
        if set(config) != {"optimizer", "loss_fn", "microbatches", "precision", "clip"} or config["clip"] < 0:
            raise KeyError("no_such_option or clip")
        Dialect.check.__func__(cls, program, **config)  # type: ignore[attr-defined]


class CanNothing(Loop):
    """Does not say what it can do."""

    name, capabilities = "can_nothing", frozenset({"tensor_parallel"})


@hookimpl
def slapo_dialects() -> dict[str, Any]:
    return dialects_in(globals())


EXAMPLE = EngineExample(
    Net, batch, loss_fn=F.mse_loss, refused=[RefusedOption("clip is -1.0", {"clip": -1.0})], plugins=(__name__,)
)


def failing(name: str, example: EngineExample) -> dict[str, str]:
    """Check to message, of those that fail."""
    found = {}
    for check in dialect_checks(name, [example]):
        try:
            check()
        except ConformanceError as error:
            found[check.name] = str(error)
    return found


def test_a_right_dialect_of_somebody_else_conforms() -> None:
    check_dialect("loop", [EXAMPLE])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "checks", "sentence"),
    [
        ("steeper", {"steps", "options", "eval", "checkpoint", "damaged", "background"}, "the loss of step 2 is"),
        ("attached", {"steps", "options"}, "train_batch() gives a loss of shape (), not a detached number"),
        ("keeps_thread", {"close"}, "after close() the thread 'left' goes on"),
        ("closes_once", {"close"}, "AttributeError"),
        ("takes_all", {"refusals"}, "build('takes_all', clip=-1.0) builds an engine; it should be refused with 'clip is -1.0'"),
        ("raises_anything", {"refusals"}, "is refused by the KeyError"),
        (
            "can_nothing",
            {"documented", "refusals", "steps", "eval", "checkpoint", "damaged", "background", "close"},
            "do not say what it can do",
        ),
        ("summed", {"options"}, "the loss of step 1 after build('summed', microbatches=2) is"),
        ("ignores_clip", {"options"}, "the loss of step 2 after build('ignores_clip', clip="),
        ("needs_optimizer", {"refusals"}, "build('needs_optimizer', optimizer=None) raises AttributeError"),
        ("changes_the_batch", {"steps", "options"}, "train_batch() changes the batch that it is given"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_fault_is_caught_by_its_check(name: str, checks: set[str], sentence: str) -> None:
    found = failing(name, EXAMPLE)
    assert {*found} == checks
    assert any(sentence in message for message in found.values()), found


def test_a_dialect_needs_options_that_it_refuses() -> None:
    (check,) = [each for each in dialect_checks("loop", [replace(EXAMPLE, refused=())]) if each.name == "examples"]
    with pytest.raises(ConformanceError, match="loop, examples: no example has refused="):
        check()
