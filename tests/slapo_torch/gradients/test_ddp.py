"""Data parallelism where replicas differ: unused and frozen parameters, errors on one, what stays theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import slapo_pipeline.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, build, create_schedule
from slapo_testing import run_distributed
from slapo_torch.gradients.reduction import DDPReplicas

from ..layouts import adamw, mesh_of, message_of

pytestmark = pytest.mark.multiproc

WIDTH = 520  # a layer is larger than the first bucket, so that a step has several
LAYOUTS = [
    ({"dp": 2}, "ddp"),
    ({"pp": 2, "dp": 2}, "ddp"),
    ({"dp": 2}, "fsdp"),
    pytest.param({"pp": 2, "dp": 2}, "fsdp", marks=pytest.mark.slow),
]
KINDS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"data_parallel": "fsdp", "fsdp_units": ["a", "b"]}}
MICROBATCHES = 2
Batch = tuple[torch.Tensor, torch.Tensor]


class Breaks(torch.autograd.Function):
    """Passes values on; its backward raises for gradients that are not numbers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.isnan().any():
            raise RuntimeError("a gradient is not a number")
        return gradient


class Layer(nn.Module):
    """Has a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Breaks.apply(self.linear(x)))


class Model(nn.Module):
    """Two layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b, self.head = nn.Embedding(16, WIDTH), Layer(), Layer(), nn.Linear(WIDTH, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(self.embed(tokens))))


class Routed(Model):
    """Uses a layer only for micro-batches that begin with token 0."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(self.a(hidden) if tokens[0, 0] == 0 else self.b(hidden))


class Twice(Model):
    """Checkpoints a layer twice, in the way that DistributedDataParallel cannot follow."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.a, self.embed(tokens), use_reentrant=True)
        return self.head(self.b(checkpoint(self.a, hidden, use_reentrant=True)))


class Normed(Model):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens).mean(1)))[:, None]


def _batches(steps: int = 3) -> list[Batch]:
    """Return the batches of both replicas together."""
    generator = torch.Generator().manual_seed(3)
    made = [
        (torch.randint(1, 16, (8, 4), generator=generator), torch.randn(8, 4, 4, generator=generator)) for _ in range(steps)
    ]
    for tokens, _ in made:
        tokens[0, 0] = 0
    return made


def _mine(batch: Batch, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    tokens, labels = (part.chunk(2)[mesh["dp"].get_local_rank()] for part in batch)
    return {"tokens": tokens, "labels": labels}


def _engine(model: nn.Module, mesh: DeviceMesh, **config: Any) -> tuple[Schedule, Any]:
    tokens = _batches(1)[0][0][:4]
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin])
    schedule = create_schedule(model, mesh=mesh, example_inputs={"tokens": tokens}, plugins=plugins)
    if mesh["pp"].size() > 1:
        schedule["a"].cut_pipeline_stage()
    config = {"optimizer": adamw, "loss_fn": F.mse_loss, "microbatches": MICROBATCHES, **config}
    return schedule, build(schedule, "torch", **config)


def _reference_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, clip: float, parts: int) -> float:
    optimizer.zero_grad()
    pairs = zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True)
    loss = torch.stack([F.mse_loss(model(tokens), labels) for tokens, labels in pairs]).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()


def _compare(schedule: Schedule, reference: nn.Module) -> float:
    """The largest difference of gradients and weights; infinite where only one has a gradient."""
    gradients, weights = schedule.full_state("grad"), schedule.full_state()
    worst = 0.0
    for name, parameter in reference.named_parameters():
        found = gradients[name]
        if (found is None) != (parameter.grad is None):
            return float("inf")
        if found is not None and parameter.grad is not None:
            worst = max(worst, float((found - parameter.grad).abs().max()))
        worst = max(worst, float((weights[name] - parameter.detach()).abs().max()))
    return worst


def _frozen(model: nn.Module, paths: tuple[str, ...]) -> nn.Module:
    for path in paths:
        model.get_submodule(path).requires_grad_(False)
    return model


def _beside_reference(
    rank: int, layout: dict[str, int], kind: type[Model], frozen: tuple[str, ...], parts: int, config: dict[str, Any]
) -> list[float]:
    mesh = mesh_of(**layout)
    torch.manual_seed(0)
    model = _frozen(kind(), frozen)
    reference = copy.deepcopy(model)
    schedule, engine = _engine(model, mesh, clip=0.5, **config)
    optimizer = adamw([parameter for parameter in reference.parameters() if parameter.requires_grad])
    differences = []
    for batch in _batches():
        loss = engine.train_batch(**_mine(batch, mesh)).item()
        differences.append(abs(loss - _reference_step(reference, optimizer, batch, 0.5, parts)))
        differences.append(_compare(schedule, reference))
    engine.close()
    return differences


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layout", "kind"), LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("frozen", "config"),
    [
        ((), {}),
        ((), {"pipeline_schedule": "gpipe", "microbatches": 4}),
        (("embed", "a"), {}),
        (("b", "head"), {}),
        (("embed", "b"), {}),
    ],
    ids=str,
)
def test_replicas_train_as_one_process_on_the_whole_batch(
    layout: dict[str, int], kind: str, frozen: tuple[str, ...], config: dict[str, Any]
) -> None:
    size, config = layout.get("pp", 1) * layout["dp"], {**config, **KINDS[kind]}
    for differences in run_distributed(_beside_reference, size, layout, Model, frozen, 1, config):
        assert max(differences) < 1e-5


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_replicas_and_micro_batches_may_use_different_parameters(kind: str) -> None:
    for differences in run_distributed(_beside_reference, 2, {"dp": 2}, Routed, (), 2 * MICROBATCHES, KINDS[kind]):
        assert max(differences) < 1e-5


def _thawed(rank: int, layout: dict[str, int], kind: str) -> list[float]:
    """Steps with ``b`` frozen from the start, with ``b`` unfrozen and ``head`` frozen, and with all trained."""
    mesh = mesh_of(**layout)
    torch.manual_seed(0)
    model = _frozen(Model(), ("b",))
    reference = copy.deepcopy(model)
    schedule, engine = _engine(model, mesh, clip=0.5, **KINDS[kind])
    optimizer = adamw([parameter for parameter in reference.parameters() if parameter.requires_grad])
    differences = []
    for step, batch in enumerate(_batches(4)):
        for root, owner in ((model, engine.optimizer), (reference, optimizer)):
            root.head.requires_grad_(step != 1)
            held = list(root.b.parameters())
            if step == 1:
                root.b.requires_grad_(True)
                if not held[0].is_meta:
                    owner.add_param_group({"params": held})
        loss = engine.train_batch(**_mine(batch, mesh)).item()
        differences.append(abs(loss - _reference_step(reference, optimizer, batch, 0.5, 1)))
        differences.append(_compare(schedule, reference))
    return differences


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "kind"), LAYOUTS, ids=str)
def test_parameters_may_be_unfrozen_and_frozen_after_the_build(layout: dict[str, int], kind: str) -> None:
    for differences in run_distributed(_thawed, layout.get("pp", 1) * layout["dp"], layout, kind):
        assert max(differences) < 1e-5


def _thawed_alone(rank: int, kind: str) -> list[str]:
    mesh = mesh_of(dp=2)
    torch.manual_seed(0)
    model = _frozen(Model(), ("embed", "a", "b", "head"))
    _, engine = _engine(model, mesh, **KINDS[kind])
    batch, messages = _mine(_batches(1)[0], mesh), []
    for alike in (False, True):
        if alike or rank == 1:
            model.b.requires_grad_(True)
        messages.append(message_of(partial(engine.train_batch, **batch)))
    return [*messages, str(engine.optimizer is not None)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_replicas_unfreeze_alike_and_what_had_no_optimizer_gets_one(kind: str) -> None:
    for refused, sound, has_optimizer in run_distributed(_thawed_alone, 2, kind):
        assert "the replicas have parameters of different names, shapes or requires_grad" in refused
        assert (sound, has_optimizer) == ("no error", "True")


def _with_errors(rank: int, layout: dict[str, int], kind: str) -> tuple[list[str], float]:
    """Steps 1 and 3 are sound; between them one replica breaks in every place where it can."""
    mesh = mesh_of(**layout)
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    schedule, engine = _engine(model, mesh, **KINDS[kind])
    optimizer = adamw(reference.parameters())
    messages = []

    def sound(batch: Batch) -> None:
        engine.train_batch(**_mine(batch, mesh))
        _reference_step(reference, optimizer, batch, float("inf"), 1)

    def broken(row: int, spoil: Callable[[Batch, int], None]) -> None:
        batch = _batches(1)[0]
        spoil(batch, row)
        messages.append(message_of(partial(engine.train_batch, **_mine(batch, mesh))))

    def in_forward(batch: Batch, row: int) -> None:
        batch[0][row] = 99

    def in_backward(batch: Batch, row: int) -> None:
        batch[1][row] = float("nan")

    broken(7, in_forward)
    for batch in _batches(2):
        for row in (4, 7, 0):
            broken(row, in_forward)
            broken(row, in_backward)
        sound(batch)
    return messages, _compare(schedule, reference)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "kind"), LAYOUTS, ids=str)
def test_an_error_on_one_replica_fails_all_and_training_goes_on(layout: dict[str, int], kind: str) -> None:
    for messages, difference in run_distributed(_with_errors, layout.get("pp", 1) * 2, layout, kind):
        assert difference < 1e-5
        assert len(messages) == 13
        assert all("index out of range" in text for text in messages[:1] + messages[1::2])
        assert all("a gradient is not a number" in text for text in messages[2::2])


def _reentrant(rank: int) -> list[str]:
    mesh = mesh_of(dp=2)
    torch.manual_seed(0)
    _, engine = _engine(Twice(), mesh)
    return [message_of(partial(engine.train_batch, **_mine(batch, mesh))) for batch in _batches(2)]


def test_a_backward_that_cannot_be_reduced_is_an_error_on_all_replicas() -> None:
    for messages in run_distributed(_reentrant, 2):
        assert all("Expected to mark a variable ready only once" in text for text in messages), messages


def _statistics(rank: int) -> tuple[list[torch.Tensor], list[str]]:
    mesh = mesh_of(dp=2)
    torch.manual_seed(0)
    model = Normed()
    alone = copy.deepcopy(model)
    _, engine = _engine(model, mesh)
    batch = _mine(_batches(1)[0], mesh)
    engine.train_batch(**batch)
    for tokens in batch["tokens"].chunk(MICROBATCHES):
        alone(tokens)
    return [model.norm.running_mean, alone.norm.running_mean], [name for name, _ in engine.module.named_parameters()]


def test_buffers_are_each_replicas_own_and_names_are_the_models() -> None:
    (first, names), (second, _) = run_distributed(_statistics, 2)
    for found, alone in (first, second):
        torch.testing.assert_close(found, alone)
    assert not torch.equal(first[0], second[0])
    assert names == [name for name, _ in Normed().named_parameters()]


def _unlike(rank: int) -> list[str]:
    mesh = mesh_of(dp=2)
    torch.manual_seed(0)
    sparse = Model()
    sparse.embed.sparse = True
    return [
        message_of(lambda: _engine(_frozen(Model(), ("a",) if rank else ()), mesh)),
        message_of(lambda: _engine(sparse, mesh)),
    ]


def test_replicas_that_cannot_be_averaged_are_refused() -> None:
    for frozen, sparse in run_distributed(_unlike, 2):
        assert "the replicas have parameters of different names, shapes or requires_grad" in frozen
        assert "the sparse gradient of 'embed' cannot be reduced over replicas; build it with sparse=False" in sparse


def _closed(rank: int) -> list[float]:
    """Gradients of a plain backward after the engine was closed, on data that differs by rank."""
    mesh = mesh_of(dp=2)
    torch.manual_seed(0)
    model = Model()
    _, engine = _engine(model, mesh)
    engine.train_batch(**_mine(_batches(1)[0], mesh))
    engine.close()
    alone = copy.deepcopy(model)
    batch = _mine(_batches(1)[0], mesh)
    for each in (model, alone):
        each.zero_grad()
        F.mse_loss(each(batch["tokens"]), batch["labels"]).backward()
    return [
        float((p.grad - q.grad).abs().max())
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
        if p.grad is not None
    ]


def test_a_closed_engine_leaves_the_model_alone() -> None:
    for differences in run_distributed(_closed, 2):
        assert max(differences) == 0.0


def _train_after_close(rank: int) -> tuple[list[str], float, bool]:
    mesh = mesh_of(dp=2)
    torch.manual_seed(0)
    model = Model()
    _, engine = _engine(model, mesh)
    before, batch = copy.deepcopy(model), _mine(_batches(1)[0], mesh)
    messages = []
    for closes in (rank == 1, True):
        if closes:
            engine.close()
        messages.append(message_of(lambda: engine.train_batch(**batch)))
    same = all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
    return messages, engine.eval_batch(**batch).item(), same


def test_a_closed_engine_trains_no_more() -> None:
    """Without the reduction over replicas they would drift apart."""
    for rank, (messages, loss, same) in enumerate(run_distributed(_train_after_close, 2)):
        one, both = messages
        assert ("rank 1 failed: " in one) == (rank == 0)
        for message in (one, both):
            assert message.endswith("this engine was closed and trains no more; build another one, or close it later")
        assert loss > 0
        assert same


def _inside_backward(rank: int) -> tuple[float, int]:
    """A gradient right after the backward, on data that differs by rank."""
    mesh = mesh_of(dp=2)
    layer = nn.Linear(1, 1, bias=False)
    replicas = DDPReplicas(layer, mesh["dp"].get_group())
    with replicas.no_sync():
        replicas.run(layer, input=torch.full((1, 1), 10.0 + rank)).sum().backward()
    replicas.run(layer, input=torch.full((1, 1), 1.0 + rank)).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.item(), replicas.finish()


def test_the_last_backward_reduces_what_all_micro_batches_gave() -> None:
    assert run_distributed(_inside_backward, 2) == [(12.0, 0)] * 2
