"""What an engine on DeepSpeed does beside training like one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_deepspeed.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
from slapo_core.build import build, get_dialect_cls
from slapo_core.registry import Registry
from slapo_core.schedule import create_schedule
from slapo_core.testing import run_distributed
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

from .layouts import batches, my_part, scheduled, small

pytestmark = pytest.mark.multiproc

TOP = Path(__file__).parents[2]
PLUGINS = Registry([slapo_deepspeed.plugin, slapo_pipeline.plugin])


def uneven(rank: int, layout: dict[str, int]) -> tuple[list[float], list[float]]:
    """Losses with unequal numbers of labels in micro-batches and replicas, and those of one process."""
    mesh = mesh_of(**layout)
    data = batches(layout.get("dp", 1))
    for batch in data:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][:, 0] = -100
        batch["labels"][-1, 0] = 7
        batch["labels"][0, 3:] = -100
        batch["labels"][-1, 5] = -100
    schedule = scheduled(small("gpt2"), mesh, my_part(data[0], mesh))
    engine = build(schedule, "deepspeed", optimizer=adamw, microbatches=2)
    found = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data]
    engine.close()
    reference, expected = small("gpt2"), []
    optimizer = adamw(reference.parameters())
    for batch in data:
        optimizer.zero_grad()
        loss = reference(**batch).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    return found, expected


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}], ids=str)
def test_a_mean_over_labels_is_that_of_the_whole_batch(layout: dict[str, int]) -> None:
    for found, expected in run_distributed(uneven, 2, layout):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """Without weight decay for norms and biases, as is usual."""
    parameters = list(parameters)
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0, "lr": 2e-2}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 2))


class Rated(nn.Module):
    """The parameters of one of its stages are all in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def empty_groups_and_frozen_modes(rank: int) -> tuple[list[float], list[float]]:
    """Losses where a stage has none of a group's parameters, of a model whose BatchNorm keeps its statistics."""
    mesh, x = mesh_of(pp=2), torch.randn(4, 4, 8)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Rated())
        models[-1].layers[1].eval()
    schedule = create_schedule(models[0], mesh=mesh, example_inputs={"x": x[0, :2]}, plugins=PLUGINS)
    schedule["layers.0"].cut_pipeline_stage()
    options: dict[str, Any] = {"optimizer": two_groups, "lr_scheduler": halved, "loss_fn": F.mse_loss, "microbatches": 2}
    engine = build(schedule, "deepspeed", **options)
    found = [engine.train_batch(x=each, labels=each).item() for each in x]
    engine.close()
    optimizer, expected = two_groups(models[1].parameters()), []
    rate = halved(optimizer)
    for each in x:
        optimizer.zero_grad()
        loss = F.mse_loss(models[1](each), each)
        loss.backward()
        optimizer.step()
        rate.step()
        expected.append(loss.item())
    return found, expected


def test_a_stage_without_one_of_the_groups_and_parts_in_evaluation_mode() -> None:
    for found, expected in run_distributed(empty_groups_and_frozen_modes, 2):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def groups_and_rates(rank: int, layout: dict[str, int], zero: int, as_objects: bool) -> tuple[list[float], list[float]]:
    """Losses with two groups of parameters, one block frozen and a falling learning rate, and those of one process."""
    mesh, data = mesh_of(**layout), batches(layout.get("dp", 1))

    def frozen() -> nn.Module:
        model: Any = small("gpt2")
        model.transformer.h[1].requires_grad_(False)
        return model

    model, reference = frozen(), frozen()
    optimizer: Any = two_groups([p for p in model.parameters() if p.requires_grad]) if as_objects else two_groups
    rate = halved(optimizer) if as_objects else halved
    schedule = scheduled(model, mesh, my_part(data[0], mesh))
    config = {"zero_optimization": {"stage": zero}}
    engine = build(schedule, "deepspeed", optimizer=optimizer, lr_scheduler=rate, microbatches=2, config=config)
    found = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data]
    engine.close()
    optimizer, expected = two_groups([p for p in reference.parameters() if p.requires_grad]), []
    rate = halved(optimizer)
    for batch in data:
        optimizer.zero_grad()
        loss = reference(**batch).loss
        loss.backward()
        optimizer.step()
        rate.step()
        expected.append(loss.item())
    return found, expected


@pytest.mark.parametrize(
    ("layout", "zero", "as_objects"),
    [({"dp": 2}, 1, False), ({"dp": 2}, 3, False), ({"tp": 2}, 2, True), ({"pp": 2}, 1, False), ({"pp": 2}, 0, True)],
    ids=str,
)
def test_groups_of_parameters_frozen_ones_and_learning_rates(layout: dict[str, int], zero: int, as_objects: bool) -> None:
    for found, expected in run_distributed(groups_and_rates, 2, layout, zero, as_objects):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


class Gated(nn.Module):
    """Has a number for all hidden values, whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu() * self.gate)


def parts_of_a_gradient(rank: int, zero: int) -> tuple[str, str]:
    """What a step says whose ranks have parts of a gradient each, and the step after it."""
    mesh = mesh_of(tp=2)
    plugins = Registry([slapo_deepspeed.plugin, slapo_sharding.plugin])
    schedule = create_schedule(Gated(), mesh=mesh, plugins=plugins)
    schedule["up"].shard("weight", axis=0)
    schedule["up"].shard("bias", axis=0)
    schedule["up"].sync("bwd_post", "all_reduce")
    schedule["down"].shard("weight", axis=1)
    schedule["down"].sync("fwd_post", "all_reduce")
    config = {"zero_optimization": {"stage": zero}}
    engine = build(schedule, "deepspeed", optimizer=adamw, loss_fn=F.mse_loss, config=config, check=False)
    batch = {"x": torch.randn(4, 4), "labels": torch.randn(4, 4)}
    return message_of(lambda: engine.train_batch(**batch)), message_of(lambda: engine.train_batch(**batch))


@pytest.mark.parametrize("zero", [0, 3])
def test_a_part_of_a_gradient_is_not_taken_for_the_whole(zero: int) -> None:
    for message, after in run_distributed(parts_of_a_gradient, 2, zero):
        assert "the gradient of 'gate', which is whole, differs between tensor-parallel ranks" in message
        assert "an error broke off a step of this engine" in after


class Skips(nn.Module):
    """Truth values, positions and a skip cross every boundary; the batch is read in the middle, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](x)  # the fixed numbers cross as integers of their bits, complex ones with a gradient
        keep, fixed, first = hidden > 0, hidden.detach().cumsum(-1), self.layers[1](hidden)
        turned = torch.complex(first, hidden)
        x = self.layers[2](first * keep) * mask
        return self.layers[3](torch.where(keep, x, fixed) + (turned * turned).real)


def structures(rank: int, stages: int) -> tuple[list[float], list[float]]:
    """Losses of a model whose stages hand on more than hidden states, and those of one process; an evaluation in between."""
    mesh, data = mesh_of(pp=stages), torch.randn(3, 8, 8)
    inputs = {"x": data[0, :4], "mask": torch.ones(4, 8)}
    torch.manual_seed(0)
    model, reference = Skips(), Skips()
    reference.load_state_dict(model.state_dict())
    schedule = create_schedule(model, mesh=mesh, example_inputs=inputs, plugins=PLUGINS)
    for layer in range(4 - stages, 3):
        schedule[f"layers.{layer}"].cut_pipeline_stage()
    engine = build(schedule, "deepspeed", optimizer=adamw, microbatches=2, loss_fn=F.mse_loss)
    optimizer, found, expected = adamw(reference.parameters()), [], []
    for rows, x in zip((8, 4, 8), data, strict=True):  # batches of another shape, and back
        batch = {"x": x[:rows], "mask": (x[:rows] > 0).float()}
        labels = x[:rows].flip(-1)
        found += [engine.eval_batch(**batch, labels=labels).item(), engine.train_batch(**batch, labels=labels).item()]
        optimizer.zero_grad()
        loss = F.mse_loss(reference(**batch), labels)
        loss.backward()
        optimizer.step()
        expected += [loss.item()] * 2
    engine.close()
    return found, expected


@pytest.mark.parametrize("stages", [2, 3])
def test_what_crosses_a_boundary_may_be_anything(stages: int) -> None:
    for found, expected in run_distributed(structures, stages, stages):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def offloaded(rank: int, zero: int) -> tuple[list[float], list[float]]:
    """Losses with the optimizer's state, and with stage 3 the weights, kept in the host's memory, and those of one process."""
    mesh, data = mesh_of(dp=2), batches(2)
    section: dict[str, Any] = {"stage": zero, "offload_optimizer": {"device": "cpu"}}
    if zero == 3:
        section["offload_param"] = {"device": "cpu"}
    config = {"zero_optimization": section, "zero_force_ds_cpu_optimizer": False}
    engine = build(scheduled(small("gpt2"), mesh, my_part(data[0], mesh)), "deepspeed", optimizer=adamw, config=config)
    found = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data]
    engine.close()
    reference, expected = small("gpt2"), []
    optimizer = adamw(reference.parameters())
    for batch in data:
        optimizer.zero_grad()
        loss = reference(**batch).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    return found, expected


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_state_in_the_hosts_memory(zero: int) -> None:
    for found, expected in run_distributed(offloaded, 2, zero):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def own_optimizer(rank: int) -> tuple[list[float], float, str]:
    """Losses with DeepSpeed's optimizer and schedule, its learning rate at the end, and what an engine without one says."""
    mesh, data = mesh_of(dp=2), batches(2)
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": 2},
    }
    engine: Any = build(scheduled(small("gpt2"), mesh, my_part(data[0], mesh)), "deepspeed", config=config)
    losses = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data]
    rate = engine.model.get_lr()[0]
    engine.close()
    only: Any = build(scheduled(small("gpt2"), mesh, my_part(data[0], mesh)), "deepspeed")
    expected = small("gpt2").eval()(**data[0]).loss.item()
    assert abs(only.eval_batch(**my_part(data[0], mesh)).item() - expected) < 2e-5
    message = message_of(lambda: only.train_batch(**my_part(data[0], mesh)))
    only.close()
    return losses, rate, message


def test_deepspeeds_own_optimizer_and_schedule_and_an_engine_without() -> None:
    first, second = run_distributed(own_optimizer, 2)
    assert first == second
    losses, rate, message = first
    assert losses[-1] < losses[0]
    assert 0 < rate <= 1e-2
    assert message == ("BuildError: this engine was built without an optimizer and only evaluates; pass optimizer= to build")


def resumed(rank: int, layout: dict[str, int], zero: int, folder: str) -> tuple[list[float], list[float]]:
    """Losses of the last two of four steps, and those of an engine that was loaded before them."""
    mesh, data = mesh_of(**layout), batches(layout.get("dp", 1))[:4]

    def engine_of() -> Any:
        schedule = scheduled(small("gpt2"), mesh, my_part(data[0], mesh))
        return build(schedule, "deepspeed", optimizer=adamw, config={"zero_optimization": {"stage": zero}})

    engine = engine_of()
    for batch in data[:2]:
        engine.train_batch(**my_part(batch, mesh))
    engine.save(folder)
    expected = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data[2:]]
    engine.close()
    engine = engine_of()
    engine.load(folder)
    found = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data[2:]]
    engine.close()
    return found, expected


@pytest.mark.parametrize(("layout", "zero"), [({"dp": 2}, 0), ({"dp": 2}, 3), ({"tp": 2}, 1), ({"pp": 2}, 1)], ids=str)
def test_saving_and_going_on(layout: dict[str, int], zero: int, tmp_path: Path) -> None:
    for found, expected in run_distributed(resumed, 2, layout, zero, str(tmp_path)):
        assert found == expected


def printing(rank: int, layout: dict[str, int]) -> list[float]:
    mesh, data = mesh_of(**layout), batches(layout.get("dp", 1))
    schedule = scheduled(small("gpt2"), mesh, my_part(data[0], mesh))
    engine = build(schedule, "deepspeed", optimizer=adamw, config={"steps_per_print": 1})
    losses = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data]
    engine.close()
    return losses


SCRIPT = """
import sys
from tests.slapo_deepspeed.test_engine import printing
import torch.distributed as dist
if __name__ == "__main__":
    dist.init_process_group("gloo")
    printing(dist.get_rank(), {"pp": 2})
    dist.destroy_process_group()
"""


def test_lines_of_an_engine_without_pipeline_are_read() -> None:
    parser: Any = get_dialect_cls("log_parser", "deepspeed", plugins=PLUGINS)
    when = "[2026-01-01 00:00:00,000] [INFO] [logging.py:128:log_dist] [Rank 0]"
    lines = [
        f"{when} step=10, skipped=1, lr=[0.001, 0.002], mom=[(0.9, 0.999)]",
        f"{when} epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=90.5, CurrSamplesPerSec=91.25, MemAllocated=0GB",
        "another line of step=3",
    ]
    assert parser.parse(lines) == [(10, None, 91.25, 0.001, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_both_launchers_start_it_and_its_log_is_read(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ranks = ["--nproc-per-node=2", "--standalone"] if launcher == "torchrun" else ["--num_gpus", "2", "--no_local_rank"]
    command = [str(Path(sys.executable).parent / launcher), *ranks, str(tmp_path / "script.py")]
    environment = {**os.environ, "PYTHONPATH": str(TOP), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    parser: Any = get_dialect_cls("log_parser", "deepspeed", plugins=PLUGINS)
    steps = parser.parse((result.stdout + result.stderr).splitlines())
    losses = run_distributed(printing, 2, {"pp": 2})[0]
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    assert [step.loss for step in steps] == pytest.approx(losses, abs=1e-4)
    assert all(step.samples_per_second > 0 for step in steps)
