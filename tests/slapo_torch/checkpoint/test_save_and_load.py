"""``save`` and ``load``: what goes on exactly, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import slapo_pipeline.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, ScheduleError, build, create_schedule, get_cuda_rng_tracker, set_random_seed
from slapo_testing import run_distributed
from slapo_tracing import trace_module
from slapo_training.checkpoint import check_plain, rng_state
from tests.engines import check_own_buffers, own_buffers

from ..layouts import mesh_of


class Scaled(nn.Module):
    """Its own weight stands where that of the layer inside was."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.ones_like(inner.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight * self.weight, self.inner.bias)


def test_two_parameters_of_one_name_are_not_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin]))
    sch["0"].replace(Scaled(model[0]))
    engine: Any = build(sch, "torch", loss_fn=nn.functional.mse_loss)
    with pytest.raises(ScheduleError, match="'0.weight' and '0.inner.weight' are both '0.weight'"):
        engine.save(tmp_path)
    assert not (tmp_path / "slapo.json").exists()


def engine_with(optimizer: Any, model: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    model = model if model is not None else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin]))
    return build(sch, "torch", optimizer=optimizer, loss_fn=nn.functional.mse_loss)


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)


def split_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (two_groups, "other parameter groups: '0.bias' and '0.weight' are in one of these, and in several here; build with"),
        (split_groups, "other parameter groups: '0.bias' and '0.weight' are in one of these, and in several here; build"),
        (
            partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            "the checkpoint's optimizer is torch.optim.adamw.AdamW, the engine's is torch.optim.sgd.SGD; build",
        ),
    ],
)
def test_the_state_of_another_optimizer_changes_nothing(optimizer: Any, message: str, tmp_path: Path) -> None:
    saved = engine_with(partial(torch.optim.AdamW, lr=0.1))
    batch = {"input": torch.ones(4, 4), "labels": torch.ones(4, 1)}
    saved.train_batch(**batch)
    saved.save(tmp_path)
    engine = engine_with(optimizer)
    before = copy.deepcopy((engine.module.state_dict(), engine.optimizer.state_dict()))
    with pytest.raises(BuildError, match=message):
        engine.load(tmp_path)
    assert str((engine.module.state_dict(), engine.optimizer.state_dict())) == str(before)
    assert engine.train_batch(**batch).isfinite()


def test_several_parameter_groups_go_on_exactly(tmp_path: Path) -> None:
    engine, batch = engine_with(two_groups), {"input": torch.ones(4, 4), "labels": torch.ones(4, 1)}
    engine.train_batch(**batch)
    engine.optimizer.param_groups[1]["lr"] = 0.05
    engine.save(tmp_path)
    ahead = [engine.train_batch(**batch).item() for _ in range(2)]
    other = engine_with(two_groups)
    other.load(tmp_path)
    assert [other.train_batch(**batch).item() for _ in range(2)] == ahead


class Remembers(torch.optim.SGD):
    """Keeps an object of its own with its state."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "notes": self.notes}

    notes: Any = Path("notes")


def test_an_optimizer_state_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    engine_with(partial(torch.optim.SGD, lr=0.1)).save(tmp_path)
    complete = (tmp_path / "slapo.json").read_text()
    with pytest.raises(BuildError, match=r"the state of Remembers, 'more', 'notes' has a pathlib\..*Path; only numbers"):
        engine_with(partial(Remembers, lr=0.1)).save(tmp_path)
    assert (tmp_path / "slapo.json").read_text() == complete


def test_plain_data_is_what_comes_back(tmp_path: Path) -> None:
    values = [None, True, 1, 1.5, 2j, "a", b"b", {"c"}, (1, [2]), torch.float16, torch.device("cpu"), torch.Size([3])]
    data = OrderedDict({"values": values, 3: {"tensor": torch.ones(2), "parameter": nn.Parameter(torch.ones(2))}})
    check_plain(data, "data")
    torch.save(data, tmp_path / "data.pt")
    assert str(torch.load(tmp_path / "data.pt", weights_only=True)) == str(data)


class Draws(nn.Module):
    """Drops layers as Python's and NumPy's generators say, and keeps a number beside its tensors."""

    def __init__(self, kept: Any = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.kept = kept

    def get_extra_state(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * random.random() * numpy.random.rand()


class Quiet(Draws):
    """Draws nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Silent(Draws):
    """Gives nothing beside its tensors."""

    get_extra_state = nn.Module.get_extra_state


def test_what_python_and_numpy_draw_goes_on_exactly(tmp_path: Path) -> None:
    set_random_seed(3)
    engine, batch = engine_with(partial(torch.optim.SGD, lr=0.1), Draws()), {"x": torch.ones(4, 4), "labels": torch.ones(4, 1)}
    engine.train_batch(**batch)
    engine.save(tmp_path)
    ahead = [engine.train_batch(**batch).item() for _ in range(3)]
    assert [engine.train_batch(**batch).item() for _ in range(3)] != ahead
    engine.load(tmp_path)
    assert [engine.train_batch(**batch).item() for _ in range(3)] == ahead


def test_the_extra_state_of_modules_comes_back(tmp_path: Path) -> None:
    set_random_seed(3)
    engine_with(None, nn.Sequential(Draws(3.0))).save(tmp_path)
    model = nn.Sequential(Draws())
    engine_with(None, model).load(tmp_path)
    assert model[0].kept == 3.0
    model[0] = trace_module(Quiet(4.0), (torch.ones(1, 4),))
    engine_with(None, model).load(tmp_path)
    assert model[0].kept == 3.0
    with pytest.raises(BuildError, match="the extra state of '0' is not in the engine; load it into the model it was saved"):
        engine_with(None, nn.Sequential(Silent())).load(tmp_path)
    with pytest.raises(BuildError, match=r"the extra state of '0', 'kept' has a torch.nn.*Linear; only numbers"):
        engine_with(None, nn.Sequential(Draws(nn.Linear(1, 1)))).save(tmp_path)


def test_a_random_state_that_cannot_be_put_back_changes_nothing(tmp_path: Path) -> None:
    set_random_seed(3)
    engine_with(None, nn.Linear(4, 1)).save(tmp_path)
    get_cuda_rng_tracker().reset()
    model = nn.Linear(4, 1)
    engine = engine_with(None, model)
    nn.init.zeros_(model.weight)
    with pytest.raises(BuildError, match="has the random state 'model-parallel-rng', this process has not; call set"):
        engine.load(tmp_path)
    assert not model.weight.any()


def test_a_gpus_random_state_comes_back_on_the_gpu_in_use() -> None:
    saved = {"cpu": torch.zeros(2), "cuda:3": torch.ones(2)}
    assert rng_state.on_device(saved, 1) == {"cpu": saved["cpu"], "cuda:1": saved["cuda:3"]}
    assert rng_state.on_device(saved, None) == {"cpu": saved["cpu"]}


def cut_with_extra_state(rank: int, path: str) -> list[Any]:
    torch.manual_seed(0)
    set_random_seed(3)
    mesh = mesh_of(pp=2, dp=2)
    model = nn.Sequential(nn.Linear(4, 4), Factor(), nn.Linear(4, 4))
    batch = {"input": torch.ones(4, 4), "labels": torch.ones(4, 4)}
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin])
    sch = create_schedule(model, mesh=mesh, example_inputs={"input": batch["input"]}, plugins=plugins)
    sch["0"].cut_pipeline_stage()
    engine: Any = build(sch, "torch", loss_fn=nn.functional.mse_loss, microbatches=2)
    model[1].factor = 2.0 + mesh["dp"].get_local_rank()
    before = engine.eval_batch(**batch).item()
    engine.save(path)
    model[1].factor = 5.0
    between = engine.eval_batch(**batch).item()
    engine.load(path)
    return [before, between, engine.eval_batch(**batch).item(), model[1].factor]


class Factor(nn.Module):
    """A number that is not a tensor."""

    factor = 1.0

    def get_extra_state(self) -> float:
        return self.factor

    def set_extra_state(self, state: float) -> None:
        self.factor = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.mark.multiproc
def test_every_replica_of_a_pipeline_gets_its_own_extra_state_back(tmp_path: Path) -> None:
    found = run_distributed(cut_with_extra_state, 4, str(tmp_path))
    assert sorted(factor for *_, factor in found) == [2.0, 2.0, 3.0, 3.0]
    for before, between, after, _ in found:
        assert before == after != between


class Weighted(Factor):
    """With a weight, so that one stage alone runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor * self.weight


def cut_elsewhere(rank: int, path: str) -> list[Any]:
    """A loss and the factors of each rank, before a save and behind a load in stages that end elsewhere."""
    mesh, found = mesh_of(pp=2), []
    for end in ("0", "2"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), Weighted(), nn.Linear(4, 4), Weighted(), nn.Linear(4, 4))
        plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin])
        sch = create_schedule(model, mesh=mesh, example_inputs={"input": torch.ones(2, 4)}, plugins=plugins)
        sch[end].cut_pipeline_stage()
        engine: Any = build(sch, "torch", loss_fn=nn.functional.mse_loss, microbatches=2)
        batch = {"input": torch.ones(4, 4), "labels": torch.ones(4, 4)}
        if end == "0":
            model[1].factor, model[3].factor = (2.0, 3.0) if rank else (5.0, 6.0)
        else:
            engine.load(path)
        found.append([engine.eval_batch(**batch).item(), model[1].factor, model[3].factor])
        if end == "0":
            engine.save(path)
    return found


@pytest.mark.multiproc
def test_extra_state_goes_with_the_stage_that_runs_the_module(tmp_path: Path) -> None:
    """Each rank has factors of its own for all modules, and those that it runs count."""
    first, second = run_distributed(cut_elsewhere, 2, str(tmp_path))
    for before, after in (first, second):
        assert before[0] == pytest.approx(after[0], abs=1e-6)
    assert first[0][1:] == [5.0, 6.0]
    assert first[1][1:] == [2.0, 6.0]  # it runs the first of both now
    assert second[1][1:] == [2.0, 3.0]


@pytest.mark.multiproc
def test_every_replica_gets_its_own_buffers_back(tmp_path: Path) -> None:
    check_own_buffers(*run_distributed(own_buffers, 2, "torch", str(tmp_path), {}))
