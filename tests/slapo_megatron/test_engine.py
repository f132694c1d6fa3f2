"""What an engine on Megatron does beside training like one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import slapo_deepspeed.plugin
import slapo_megatron.plugin
import slapo_sharding.plugin
from slapo_core.build import build, get_dialect_cls
from slapo_core.registry import Registry
from slapo_core.schedule import create_schedule
from slapo_core.testing import run_distributed
from tests.slapo_deepspeed.layouts import batches, my_part, small
from tests.slapo_deepspeed.test_engine import Gated, Rated, Skips, halved, two_groups
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

from .layouts import PLUGINS, scheduled

pytestmark = pytest.mark.multiproc


def trained(engine: Any, data: list[dict[str, Any]], mesh: Any) -> list[float]:
    """Losses of the engine, which is closed then."""
    losses = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data]
    engine.close()
    return losses


def alone(model: nn.Module, optimizer: torch.optim.Optimizer, rate: Any, losses: Any) -> list[float]:
    """Losses of one process; those given make each of them."""
    found = []
    for loss_of in losses:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        if rate is not None:
            rate.step()
        found.append(loss.item())
    return found


def uneven(rank: int, layout: dict[str, int]) -> tuple[list[float], list[float]]:
    """Losses with unequal numbers of labels in micro-batches and replicas, and those of one process."""
    mesh, data = mesh_of(**layout), batches(layout.get("dp", 1))
    for batch in data:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][0, 3:] = -100
        batch["labels"][-1, 5] = -100
    engine = build(scheduled(small("gpt2"), mesh, my_part(data[0], mesh)), "megatron", optimizer=adamw, microbatches=2)
    found = trained(engine, data, mesh)
    reference = small("gpt2")
    each = [lambda model, batch=batch: model(**batch).loss for batch in data]
    return found, alone(reference, adamw(reference.parameters()), None, each)


def groups_and_rates(
    rank: int, layout: dict[str, int], shared: bool, as_objects: bool, ddp: dict[str, Any]
) -> tuple[list[float], list[float]]:
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
    options: dict[str, Any] = {"distributed_optimizer": shared, "config": {"ddp": ddp}}
    engine = build(schedule, "megatron", optimizer=optimizer, lr_scheduler=rate, microbatches=2, **options)
    found = trained(engine, data, mesh)
    optimizer = two_groups([p for p in reference.parameters() if p.requires_grad])
    each = [lambda model, batch=batch: model(**batch).loss for batch in data]
    return found, alone(reference, optimizer, halved(optimizer), each)


def structures(rank: int, stages: int) -> tuple[list[float], list[float]]:
    """Losses of a model whose stages hand on more than hidden states, and those of one process; an evaluation in between."""
    mesh, data = mesh_of(pp=2), torch.randn(3, 8, 8)
    torch.manual_seed(0)
    model, reference = Skips(), Skips()
    reference.load_state_dict(model.state_dict())
    example = {"x": data[0, :4], "mask": torch.ones(4, 8)}
    schedule = create_schedule(model, mesh=mesh, example_inputs=example, plugins=PLUGINS)
    for layer in range(4 - stages, 3):
        schedule[f"layers.{layer}"].cut_pipeline_stage()
    engine = build(schedule, "megatron", optimizer=adamw, microbatches=2, loss_fn=F.mse_loss)
    optimizer, found, expected = adamw(reference.parameters()), [], []
    for rows, x in zip((8, 4, 8), data, strict=True):  # batches of another shape, and back
        batch = {"x": x[:rows], "mask": (x[:rows] > 0).float()}
        labels = x[:rows].flip(-1)
        found += [engine.eval_batch(**batch, labels=labels).item(), engine.train_batch(**batch, labels=labels).item()]
        expected += alone(reference, optimizer, None, [lambda model: F.mse_loss(model(**batch), labels)]) * 2  # noqa: B023
    engine.close()
    return found, expected


def frozen_modes(rank: int) -> tuple[list[float], list[float]]:
    """Losses where a stage has none of a group's parameters, of a model whose BatchNorm keeps its statistics."""
    mesh, x, models = mesh_of(pp=2), torch.randn(4, 4, 8), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Rated())
        models[-1].layers[1].eval()
    schedule = create_schedule(models[0], mesh=mesh, example_inputs={"x": x[0, :2]}, plugins=PLUGINS)
    schedule["layers.0"].cut_pipeline_stage()
    options: dict[str, Any] = {"optimizer": two_groups, "lr_scheduler": halved, "loss_fn": F.mse_loss, "microbatches": 2}
    engine = build(schedule, "megatron", distributed_optimizer=True, **options)
    found = [engine.train_batch(x=each, labels=each).item() for each in x]
    engine.close()
    optimizer = two_groups(models[1].parameters())
    each = [lambda model, one=one: F.mse_loss(model(one), one) for one in x]
    return found, alone(models[1], optimizer, halved(optimizer), each)


class Unused(nn.Module):
    """The last stage reads what crosses without a gradient back to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(_Blocked.apply(self.first(x)))


class _Blocked(torch.autograd.Function):
    """Gives no gradient for what it reads, though it could."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


def unreached(rank: int) -> tuple[list[float], list[float]]:
    """Losses of a model whose first stage gets a gradient of zeros, without weight decay."""
    mesh, x = mesh_of(pp=2), torch.randn(3, 4, 4)

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)

    torch.manual_seed(0)
    model, reference = Unused(), Unused()
    reference.load_state_dict(model.state_dict())
    schedule = create_schedule(model, mesh=mesh, example_inputs={"x": x[0, :2]}, plugins=PLUGINS)
    schedule["first"].cut_pipeline_stage()
    engine = build(schedule, "megatron", optimizer=plain, loss_fn=F.mse_loss, microbatches=2)
    found = [engine.train_batch(x=each, labels=each).item() for each in x]
    engine.close()
    each = [lambda model, one=one: F.mse_loss(model(one), one) for one in x]
    return found, alone(reference, plain(reference.parameters()), None, each)


@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        (uneven, ({"dp": 2},)),
        (uneven, ({"pp": 2},)),
        (groups_and_rates, ({"dp": 2}, True, False, {"overlap_grad_reduce": True, "average_in_collective": True})),
        (groups_and_rates, ({"dp": 2}, False, True, {"overlap_grad_reduce": True})),
        (groups_and_rates, ({"pp": 2}, True, True, {})),
        (structures, (2,)),
        (structures, (4,)),
        (frozen_modes, ()),
        (unreached, ()),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_losses_are_those_of_one_process(case: Any, arguments: tuple[Any, ...]) -> None:
    for found, expected in run_distributed(case, 2, *arguments):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def parts_of_a_gradient(rank: int, shared: bool) -> tuple[str, str]:
    """What a step says whose ranks have parts of a gradient each, and the step after it."""
    schedule = create_schedule(Gated(), mesh=mesh_of(tp=2), plugins=PLUGINS)
    schedule["up"].shard("weight", axis=0)
    schedule["up"].shard("bias", axis=0)
    schedule["up"].sync("bwd_post", "all_reduce")
    schedule["down"].shard("weight", axis=1)
    schedule["down"].sync("fwd_post", "all_reduce")
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "distributed_optimizer": shared, "check": False}
    engine = build(schedule, "megatron", optimizer=adamw, **options)
    batch = {"x": torch.randn(4, 4), "labels": torch.randn(4, 4)}
    messages = message_of(lambda: engine.train_batch(**batch)), message_of(lambda: engine.train_batch(**batch))
    engine.close()
    return messages


@pytest.mark.parametrize("shared", [False, True])
def test_a_part_of_a_gradient_is_not_taken_for_the_whole(shared: bool) -> None:
    for message, after in run_distributed(parts_of_a_gradient, 2, shared):
        assert "the gradient of 'gate', which is whole, differs between tensor-parallel ranks" in message
        assert "an error broke off a step of this engine" in after


class Turned(nn.Module):
    """Has a complex buffer, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4) + 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.up(x).float().reshape(-1, 4, 2))
        return self.down(torch.view_as_real(pairs * self.turn).reshape(-1, 8).to(x.dtype))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("bf16", 2e-2)])
def test_complex_buffers_stay_complex(precision: str, tolerance: float) -> None:
    torch.manual_seed(0)
    model, reference, x = Turned(), Turned(), torch.randn(4, 4)
    reference.load_state_dict(model.state_dict())
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "precision": precision}
    engine = build(create_schedule(model, plugins=PLUGINS), "megatron", optimizer=adamw, **options)
    found = [engine.train_batch(x=x, labels=x).item() for _ in range(3)]
    engine.close()
    expected = alone(reference, adamw(reference.parameters()), None, [lambda model: F.mse_loss(model(x), x)] * 3)
    assert found == pytest.approx(expected, abs=tolerance)


class Halves(nn.Module):
    """What is sharded is in its first half alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.last = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.down(self.up(x).relu())))


def half_sharded(rank: int) -> tuple[list[float], list[float]]:
    """Losses where one stage has shards and the other has none, and those of one process."""
    mesh, x = mesh_of(pp=2, tp=2), torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model, reference = Halves(), Halves()
    reference.load_state_dict(model.state_dict())
    schedule = create_schedule(model, mesh=mesh, example_inputs={"x": x[0, :2]}, plugins=PLUGINS)
    schedule.tensor_parallel({"up": "colwise", "down": "rowwise"})
    schedule["down"].cut_pipeline_stage()
    engine = build(schedule, "megatron", optimizer=adamw, loss_fn=F.mse_loss, microbatches=2)
    found = [engine.train_batch(x=each, labels=each).item() for each in x]
    engine.close()
    each = [lambda model, one=one: F.mse_loss(model(one), one) for one in x]
    return found, alone(reference, adamw(reference.parameters()), None, each)


def test_a_stage_without_shards_beside_one_with() -> None:
    for found, expected in run_distributed(half_sharded, 4):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def started_apart(rank: int, target: str, layout: dict[str, int]) -> str:
    """What building says where ranks made models of other weights."""
    mesh = mesh_of(**layout)
    torch.manual_seed(rank)
    plugins = Registry([slapo_deepspeed.plugin, slapo_megatron.plugin, slapo_sharding.plugin])
    schedule = create_schedule(Halves(), mesh=mesh, plugins=plugins)
    if layout.get("tp", 1) > 1:
        schedule.tensor_parallel({"up": "colwise", "down": "rowwise"})
    return message_of(lambda: build(schedule, target, optimizer=adamw, loss_fn=F.mse_loss, check=False))


@pytest.mark.parametrize(
    ("target", "axis", "ranks"),
    [("megatron", "dp", "replicas"), *((target, "tp", "tensor-parallel ranks") for target in ("deepspeed", "megatron"))],
)
def test_ranks_that_start_from_other_numbers_are_refused(target: str, axis: str, ranks: str) -> None:
    for message in run_distributed(started_apart, 2, target, {axis: 2}):
        assert f"the {ranks} start from different values of" in message
        assert "seed all ranks alike" in message


def test_what_is_frozen_after_build_is_refused_in_training_alone() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = build(create_schedule(model, plugins=PLUGINS), "megatron", optimizer=adamw, loss_fn=F.mse_loss)
    batch = {"input": torch.ones(2, 4), "labels": torch.ones(2, 4)}
    engine.train_batch(**batch)
    model[1].bias.requires_grad_(False)
    assert message_of(lambda: engine.train_batch(**batch)).startswith("BuildError: '1.bias' was frozen after build")
    assert message_of(lambda: engine.eval_batch(**batch)) == "no error"
    model[1].bias.requires_grad_(True)
    assert message_of(lambda: engine.train_batch(**batch)) == "no error"
    engine.close()


def megatrons_optimizer(rank: int) -> tuple[list[float], str, list[float]]:
    """Losses with Megatron's optimizer and those of one process; what an engine without one says, and evaluates."""
    mesh, data = mesh_of(dp=2), batches(2)
    section = {"optimizer": "adam", "lr": 1e-2, "adam_eps": 1e-3, "weight_decay": 0.0}
    schedule = scheduled(small("gpt2"), mesh, my_part(data[0], mesh))
    found = trained(build(schedule, "megatron", config={"optimizer": section}, microbatches=2), data, mesh)
    reference = small("gpt2")
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    expected = alone(reference, optimizer, None, [lambda model, batch=batch: model(**batch).loss for batch in data])
    only: Any = build(scheduled(small("gpt2"), mesh, my_part(data[0], mesh)), "megatron")
    evaluated = only.eval_batch(**my_part(data[0], mesh)).item()
    message = message_of(lambda: only.train_batch(**my_part(data[0], mesh)))
    only.close()
    differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    return differences, message, [abs(evaluated - small("gpt2").eval()(**data[0]).loss.item())]


def test_megatrons_own_optimizer_and_an_engine_without() -> None:
    for differences, message, evaluated in run_distributed(megatrons_optimizer, 2):
        assert max(differences + evaluated) < 2e-5
        assert message == "BuildError: this engine was built without an optimizer and only evaluates; pass optimizer= to build"


def set_up_by_the_user(rank: int) -> tuple[float, float, str, bool]:
    """A loss on groups that were there before, and that of one process; what others say; whether they outlive an engine."""
    from megatron.core import parallel_state

    mesh, data = mesh_of(tp=2), batches(1)
    parallel_state.initialize_model_parallel(2, 1, create_gloo_process_groups=False, distributed_timeout_minutes=1)
    engine = build(scheduled(small("gpt2"), mesh, data[0]), "megatron", optimizer=adamw)
    loss = engine.train_batch(**data[0]).item()
    engine.close()
    outlives = parallel_state.model_parallel_is_initialized()
    flat = mesh_of(dp=2)
    schedule = scheduled(small("gpt2"), flat, my_part(batches(2)[0], flat))
    message = message_of(lambda: build(schedule, "megatron", optimizer=adamw))
    parallel_state.destroy_model_parallel()
    return loss, small("gpt2")(**data[0]).loss.item(), message, outlives


def test_groups_that_the_user_set_up() -> None:
    for loss, expected, message, outlives in run_distributed(set_up_by_the_user, 2):
        assert loss == pytest.approx(expected, abs=2e-5)
        assert outlives
        assert "megatron's parallel_state is set up with other groups along tp than the schedule's mesh" in message


def test_the_log_of_megatrons_training_script_is_read() -> None:
    parser: Any = get_dialect_cls("log_parser", "megatron", plugins=PLUGINS)
    line = (
        " [2026-01-01 00:00:00] iteration       10/     100 | consumed samples:          320 | elapsed time per iteration "
        "(ms): 250.0 | learning rate: 1.500000E-04 | global batch size:    32 | lm loss: 4.125000E+00 | loss scale: 1.0 | "
        "grad norm: 2.500 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    assert parser.parse(["loading", line]) == [(10, 4.125, 0.25, 1.5e-4, 2.5, 0)]


def alone_in_its_process() -> tuple[float, float]:
    """Without a mesh and without a process group; both losses."""
    batch = batches(1)[0]
    engine = build(create_schedule(small("gpt2"), plugins=PLUGINS), "megatron", optimizer=adamw, microbatches=2)
    loss = engine.train_batch(**batch).item()
    engine.close()
    assert not dist.is_initialized()
    return loss, small("gpt2")(**batch).loss.item()


def test_one_process_alone() -> None:
    found, expected = alone_in_its_process()
    assert found == pytest.approx(expected, abs=2e-5)
