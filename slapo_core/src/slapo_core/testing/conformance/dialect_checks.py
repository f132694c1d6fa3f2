"""What a dialect promises, as checks of one example each, run on each rank."""

from __future__ import annotations

import copy
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...build import build
from ...dialect import Dialect
from ...engine import Engine
from ...errors import BuildError
from ...schedule import Schedule, create_schedule
from .case import ConformanceError, check_sentence, registry_of
from .examples import EngineExample, RefusedOption
from .snapshot import Snapshot, first_of

STEPS = 4
"""Of training; the loss of each but the first tells of the step before. A checkpoint is taken in the middle."""
AXES = ("pp", "dp", "tp")


class EngineCase:
    """An example of a dialect on this rank.

    Args:
        name: The target.
        example: The example.
        folder: An empty one that all ranks see.
    """

    def __init__(self, name: str, example: EngineExample, folder: str) -> None:
        self.name, self.example, self.folder = name, example, Path(folder)
        self.registry = registry_of(example.plugins)
        self.mesh: DeviceMesh = init_device_mesh("cpu", tuple(example.mesh.get(axis, 1) for axis in AXES), mesh_dim_names=AXES)

    @property
    def dialect(self) -> type[Dialect]:
        """Its class."""
        return self.registry.dialect(self.name)

    def model(self) -> nn.Module:
        """A fresh one, of the same numbers each time."""
        torch.manual_seed(0)
        return self.example.model()

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """This data-parallel rank's part."""
        parts = self.mesh["dp"].size()
        rank = self.mesh["dp"].get_local_rank()
        return {name: value.chunk(parts)[rank] for name, value in self.example.batch(step).items()}

    def schedule(self, model: nn.Module | None = None) -> Schedule:
        """The top schedule with all steps."""
        inputs = {key: value for key, value in self.batch(0).items() if self.example.loss_fn is None or key != "labels"}
        made = create_schedule(
            self.model() if model is None else model, mesh=self.mesh, example_inputs=inputs, plugins=self.registry
        )
        if self.example.before is not None:
            self.example.before(made)
        return made

    @contextmanager
    def engine(self, schedule: Schedule | None = None) -> Iterator[Engine]:
        """The engine, closed at the end."""
        made = self.build(self.schedule() if schedule is None else schedule, self.example.options)
        try:
            yield made
        finally:
            made.close()

    def build(self, schedule: Schedule, options: Mapping[str, Any]) -> Engine:
        """As the user does."""
        common = {"optimizer": self.example.optimizer, "loss_fn": self.example.loss_fn}
        return build(schedule, self.name, **{**common, **options})

    def equal(self, found: float, expected: float, what: str) -> None:
        """Raise unless a loss is the other one."""
        if not abs(found - expected) <= self.example.atol:  # nor NaN
            raise ConformanceError(f"{what} is {found:.7g}, {abs(found - expected):.2g} off {expected:.7g}")

    def reference(self) -> Iterator[tuple[float, nn.Module]]:
        """The loss of each step of the unmodified model in one process, and the model behind it."""
        model = self.model()
        optimizer = self.example.optimizer(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = self.loss(model, step)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield float(loss.detach()), model

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """The unmodified model's of the whole batch."""
        batch = self.example.batch(step)
        if self.example.loss_fn is not None:
            labels = batch.pop("labels", None)
            return self.example.loss_fn(model(**batch), labels)
        outputs = model(**batch)
        found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
        assert isinstance(found, torch.Tensor), "the example's model gives no loss; give loss_fn="
        return found


def refusals(case: EngineCase) -> None:
    """Wrong options are refused by a ``BuildError`` of one sentence, and nothing is built."""
    unknown = RefusedOption("no_such_option", {**case.example.options, "no_such_option": 1})
    precision = RefusedOption("fp12", {**case.example.options, "precision": "fp12"})
    for refused in (*case.example.refused, unknown, precision):
        _refuse(case, refused)


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


def steps(case: EngineCase) -> None:
    """Losses of training are those of the unmodified model."""
    with case.engine() as engine:
        for step, (expected, _) in enumerate(case.reference()):
            loss = engine.train_batch(**case.batch(step))
            if loss.shape != () or loss.requires_grad:
                raise ConformanceError(f"train_batch() gives a loss of shape {tuple(loss.shape)}, not a detached number")
            case.equal(float(loss), expected, f"the loss of step {step + 1}")


def evaluation(case: EngineCase) -> None:
    """``eval_batch`` gives the loss in evaluation mode, and training goes on as if it had not been called."""
    with case.engine() as engine:
        modes: list[bool] = []
        for step, (expected, model) in enumerate(case.reference()):
            case.equal(
                float(engine.train_batch(**case.batch(step))), expected, f"the loss of step {step + 1}, between evaluations"
            )
            now = [module.training for module in engine.module.modules()]
            if modes not in ([], now):
                raise ConformanceError("after eval_batch() modules are in another mode in training")
            modes = now
            weights = [tensor.detach().clone() for tensor in engine.module.parameters()]
            found = float(engine.eval_batch(**case.batch(step)))
            with torch.no_grad():
                wanted = float(case.loss(copy.deepcopy(model).eval(), step))
            case.equal(found, wanted, f"eval_batch() after step {step + 1}")
            if not all(map(torch.equal, weights, [tensor.detach() for tensor in engine.module.parameters()])):
                raise ConformanceError("eval_batch() changes parameters")


def checkpoint(case: EngineCase) -> None:
    """What ``save`` wrote goes on in another engine as if nothing had happened, and so does one that could not load."""
    losses = [loss for loss, _ in case.reference()]
    with case.engine() as engine:
        for step in range(STEPS // 2):
            engine.train_batch(**case.batch(step))
        engine.save(case.folder / "checkpoint")
        try:
            engine.load(case.folder / "none")
        except Exception as error:
            check_sentence(error, "load() of a folder that is not there")
        else:
            raise ConformanceError("load() of a folder that is not there raises nothing")
        _goes_on(case, engine, losses, "save() and a load() that was refused")
    with case.engine(_zeros(case)) as engine:
        engine.load(case.folder / "checkpoint")
        _goes_on(case, engine, losses, "load()")


def background(case: EngineCase) -> None:
    """``save`` writes what there was as it was called, where it takes ``wait=False``; its ``extra`` is given back."""
    losses = [loss for loss, _ in case.reference()]
    extra = {"next": STEPS // 2, "seen": torch.arange(3)}
    with case.engine() as engine:
        takes = inspect.signature(engine.save).parameters
        options = {name: value for name, value in (("extra", extra), ("wait", False)) if name in takes}
        if not options:
            return
        for step in range(STEPS // 2):
            engine.train_batch(**case.batch(step))
        saving = engine.save(case.folder / "behind", **options)
        _goes_on(case, engine, losses, f"save({', '.join(options)})")
        if "wait" in options:
            saving.wait()
    with case.engine(_zeros(case)) as engine:
        given = engine.load(case.folder / "behind")
        if "extra" in options and str(given) != str(extra):
            raise ConformanceError(f"load() gives back {given!r}, and save() was given extra={extra!r}")
        _goes_on(case, engine, losses, f"load() of what save({', '.join(options)}) wrote")


def _zeros(case: EngineCase) -> Schedule:
    """The schedule of a model whose parameters are zeros."""
    model = case.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return case.schedule(model)


def _goes_on(case: EngineCase, engine: Engine, losses: list[float], after: str) -> None:
    """The first loss tells of the parameters, the next of the optimizer."""
    for step in range(STEPS // 2, STEPS):
        found = float(engine.train_batch(**case.batch(step)))
        case.equal(found, losses[step], f"the loss {step - STEPS // 2 + 1} steps after {after}")


def closing(case: EngineCase) -> None:
    """``close`` gives back threads, does no harm twice, and leaves room for another engine."""
    expected = [loss for loss, _ in case.reference()]
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
    "eval": evaluation,
    "checkpoint": checkpoint,
    "background": background,
    "close": closing,
}
"""What is checked with each example of a dialect."""


def on_rank(check: str, name: str, example: EngineExample, folder: str) -> None:
    """One check on one of the processes."""
    CHECKS[check](EngineCase(name, example, folder))
