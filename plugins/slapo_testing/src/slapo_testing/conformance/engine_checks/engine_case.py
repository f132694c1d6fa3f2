"""One example of a dialect, made real on each rank: engines, and the unmodified model that they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slapo_core import Dialect, Engine, Schedule, build, create_schedule

from ..examples.case import ConformanceError, registry_of
from ..examples.examples import EngineExample

STEPS = 4
"""Number of training steps. Each loss but the first depends on the step before. A checkpoint is taken midway."""
AXES = ("pp", "dp", "tp")


class EngineCase:
    """An example of a dialect on this rank.

    Args:
        name: Name of the target.
        example: The example.
        folder: Empty folder that all ranks share.
    """

    def __init__(self, name: str, example: EngineExample, folder: str) -> None:
        self.name, self.example, self.folder = name, example, Path(folder)
        self.registry = registry_of(example.plugins)
        self.mesh: DeviceMesh = init_device_mesh("cpu", tuple(example.mesh.get(axis, 1) for axis in AXES), mesh_dim_names=AXES)

    @property
    def dialect(self) -> type[Dialect]:
        """Class of the dialect."""
        return self.registry.get("dialect", self.name)  # type: ignore[no-any-return]

    def model(self) -> nn.Module:
        """Return a new model, with the same numbers each time."""
        torch.manual_seed(0)
        return self.example.model()

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Return this data-parallel rank's part of the batch."""
        parts = self.mesh["dp"].size()
        rank = self.mesh["dp"].get_local_rank()
        return {name: value.chunk(parts)[rank] for name, value in self.example.batch(step).items()}

    def schedule(self, model: nn.Module | None = None) -> Schedule:
        """Return the top schedule with all steps."""
        inputs = {key: value for key, value in self.batch(0).items() if self.example.loss_fn is None or key != "labels"}
        model = self.model() if model is None else model
        made = create_schedule(model, mesh=self.mesh, example_inputs=inputs, plugins=self.registry)
        if self.example.before is not None:
            self.example.before(made)
        return made

    @contextmanager
    def engine(self, schedule: Schedule | None = None, options: Mapping[str, Any] | None = None) -> Iterator[Engine]:
        """Yield an engine, and close it after the ``with`` block."""
        options = self.example.options if options is None else options
        with closing(self.build(self.schedule() if schedule is None else schedule, options)) as made:
            yield made

    def build(self, schedule: Schedule, options: Mapping[str, Any]) -> Engine:
        """Build an engine as a user does."""
        common = {"optimizer": self.example.optimizer, "loss_fn": self.example.loss_fn}
        return build(schedule, self.name, **{**common, **options})

    def evaluate(self, engine: Engine, step: int) -> float:
        """Return the engine's loss in evaluation mode."""
        return float(engine.eval_batch(**self.batch(step)).detach())

    def equal(self, found: float, expected: float, what: str) -> None:
        """Raise ``ConformanceError`` unless two losses are equal up to the tolerance."""
        if not abs(found - expected) <= self.example.atol:  # nor NaN
            raise ConformanceError(f"{what} is {found:.7g}, {abs(found - expected):.2g} off {expected:.7g}")

    def losses(self, options: Mapping[str, Any]) -> list[float]:
        """Return the loss of each step of the unmodified model in one process."""
        return [loss for loss, _ in self.reference(options)]

    def reference(self, options: Mapping[str, Any]) -> Iterator[tuple[float, nn.Module]]:
        """Yield the loss of each step of the unmodified model in one process, and the model after the step."""
        model = self.model()
        optimizer = self.example.optimizer(model.parameters())
        parts = options.get("microbatches", 1) * self.mesh["dp"].size()
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = self.backward(model, step, parts)
            if clip := options.get("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            yield loss, model

    def backward(self, model: nn.Module, step: int, parts: int = 1) -> float:
        """Run backward for equal parts of a batch of the unmodified model, and return the mean loss."""
        batch, total = self.example.batch(step), 0.0
        for part in zip(*(value.chunk(parts) for value in batch.values()), strict=True):
            loss = self.loss(model, dict(zip(batch, part, strict=True))) / parts
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def unmodified_loss(self, model: nn.Module, step: int) -> float:
        """Return the loss of the unmodified model in evaluation mode."""
        with torch.no_grad():
            return float(self.loss(copy.deepcopy(model).eval(), self.example.batch(step)))

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss of the unmodified model for a batch."""
        if self.example.loss_fn is not None:
            labels = batch.pop("labels", None)
            return self.example.loss_fn(model(**batch), labels)
        outputs = model(**batch)
        found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
        assert isinstance(found, torch.Tensor), "the example's model gives no loss; give loss_fn="
        return found
