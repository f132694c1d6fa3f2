"""Pipelines of real processes: ties, dropout, resuming, odd inputs, errors."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import build, set_random_seed
from slapo_testing import run_distributed

from ..layouts import adamw, gpt2, losses, mesh_of, message_of, my_part, scheduled, tokens

pytestmark = pytest.mark.multiproc


def _ties_and_memory(rank: int) -> dict[str, Any]:
    mesh = mesh_of(pp=4)
    model = gpt2()
    data = tokens(1)
    schedule = scheduled(model, mesh, my_part(data[0], mesh))
    groups = len(torch.distributed.distributed_c10d._world.pg_map)
    engine: Any = build(schedule, "torch", optimizer=adamw, microbatches=4)
    losses(engine, mesh, data)
    engine.close()
    return {
        "tied": {
            n: p.detach() for n, p in engine.module.named_parameters() if n in ("transformer.wte.weight", "lm_head.weight")
        },
        "real": sorted(n for n, p in model.named_parameters(remove_duplicate=False) if not p.is_meta),
        "held": sorted(n for n, _ in engine.module.named_parameters()),
        "groups_made": len(torch.distributed.distributed_c10d._world.pg_map) - groups,
    }


@pytest.mark.slow
def test_ties_stay_bit_equal_and_other_stages_weights_are_freed() -> None:
    found = run_distributed(_ties_and_memory, 4)
    first, last = found[0]["tied"]["transformer.wte.weight"], found[3]["tied"]["lm_head.weight"]
    assert torch.equal(first, last)
    assert found[1]["tied"] == {}
    for rank in (1, 2):
        assert found[rank]["real"] == found[rank]["held"]
    assert "transformer.wpe.weight" not in found[3]["real"]
    assert [rank["groups_made"] for rank in found] == [0, 0, 0, 0]


def _with_dropout(rank: int, path: str | None) -> list[Any]:
    mesh = mesh_of(pp=2, dp=2)
    set_random_seed(5, dp_rank=mesh["dp"].get_local_rank(), pp_rank=mesh["pp"].get_local_rank())
    data = tokens(2, steps=4)
    states = [torch.get_rng_state()]
    model = gpt2(dropout=0.1)
    torch.set_rng_state(states[0])
    engine: Any = build(scheduled(model, mesh, my_part(data[0], mesh)), "torch", optimizer=adamw, microbatches=2)
    first = losses(engine, mesh, data[:2])
    if path is not None:
        engine.save(path)
    return first + losses(engine, mesh, data[2:])


def _resumed(rank: int, path: str) -> list[float]:
    mesh = mesh_of(pp=2, dp=2)
    set_random_seed(99)
    data = tokens(2, steps=4)
    engine: Any = build(scheduled(gpt2(dropout=0.1), mesh, my_part(data[0], mesh)), "torch", optimizer=adamw, microbatches=2)
    engine.load(path)
    return losses(engine, mesh, data[2:])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[float]]]:
    """A checkpoint behind the second step of two stages and two replicas, and the losses of all steps."""
    path = str(tmp_path_factory.mktemp("checkpoint") / "saved")
    return path, run_distributed(_with_dropout, 4, path)


def test_two_runs_are_identical_and_resuming_goes_on_exactly(checkpoint: tuple[str, list[list[float]]]) -> None:
    path, once = checkpoint
    assert run_distributed(_with_dropout, 4, None) == once
    assert len({tuple(run) for run in once}) == 1
    assert run_distributed(_resumed, 4, path) == [run[2:] for run in once]


def _other_layout(rank: int, path: str, stages: int) -> list[str]:
    mesh = mesh_of(pp=stages)
    engine: Any = build(scheduled(gpt2(), mesh, my_part(tokens(1)[0], mesh)), "torch", optimizer=adamw, microbatches=4)
    return [message_of(lambda: engine.load(path)), message_of(lambda: engine.load(path + "/none"))]


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_another_layout_loads_and_nothing_is_loaded_from_nowhere(
    stages: int, checkpoint: tuple[str, list[list[float]]]
) -> None:
    for messages in run_distributed(_other_layout, stages, checkpoint[0], stages):
        assert messages[0] == "no error"
        assert "is not a checkpoint of target 'torch': there is no such folder" in messages[1]


class Unusual(nn.Module):
    """Sends masks, integers and a skip; fails on demand in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        chosen, order = first > 0, first.argsort(-1)
        middle = Fragile.apply(self.b(first))
        return self.c(torch.where(chosen, middle, first).gather(-1, order) + first)


class Fragile(torch.autograd.Function):
    """Passes values on, and raises at a number no test means to have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.isnan().any():
            raise RuntimeError("a gradient is not a number")
        return gradient


def _unusual(rank: int) -> list[Any]:
    import slapo_pipeline.plugin
    import slapo_torch.plugin
    from slapo_core import Registry, create_schedule

    mesh = mesh_of(pp=3)
    torch.manual_seed(0)
    model = Unusual()
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    expected = F.mse_loss(model(x), y).item()
    schedule = create_schedule(
        model,
        mesh=mesh,
        example_inputs={"x": x},
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin]),
    )
    schedule["a"].cut_pipeline_stage()
    schedule["b"].cut_pipeline_stage()
    engine: Any = build(schedule, "torch", optimizer=adamw, loss_fn=F.mse_loss, microbatches=3)
    before = schedule.full_state()
    labels = torch.full_like(y, float("nan"))
    messages = [
        message_of(lambda: engine.train_batch(x=x, labels=labels)),
        message_of(lambda: engine.train_batch(x=x[:, :3], labels=y)),
        message_of(lambda: engine.train_batch(x=x if rank else x[:5], labels=y)),
        message_of(lambda: engine.train_batch(x=x if rank else x[:3], labels=y if rank else y[:3])),
        message_of(lambda: engine.train_batch(x=x)),
    ]
    unchanged = all(torch.equal(value, before[name]) for name, value in schedule.full_state().items())
    first = engine.train_batch(x=x, labels=y).item()
    other_shape = engine.train_batch(x=x[:3], labels=y[:3]).item()
    return [messages, unchanged, first - expected, other_shape > 0]


def test_errors_reach_every_rank_and_training_goes_on() -> None:
    started = time.monotonic()
    found = run_distributed(_unusual, 3)
    assert time.monotonic() - started < 30
    for messages, unchanged, difference, other_shape in found:
        assert unchanged
        assert other_shape
        assert abs(difference) < 1e-6
        assert "a gradient is not a number" in messages[0]
        assert "the forward does not run" in messages[1]
        assert "now has the shape (5, 4) in a batch of 6 rows" in messages[2]
        assert "the ranks were given batches of different names, shapes or types" in messages[3]
        assert "loss_fn needs labels" in messages[4]
    assert found[0][0][0].startswith("BuildError: rank 2 failed: RuntimeError")
    assert found[2][0][2].startswith("BuildError: rank 0 failed:")


def _labels(rank: int, layout: dict[str, int], kind: str, per_rank: int) -> list[float]:
    """Largest differences of losses and gradients where micro-batches, then replicas, have different numbers of labels."""
    mesh = mesh_of(**layout)
    dp = mesh["dp"].size()
    data = tokens(dp)[0]
    model = gpt2()
    reference = copy.deepcopy(model)
    schedule = scheduled(model, mesh, my_part(data, mesh), per_rank)
    engine: Any = build(schedule, "torch", optimizer=adamw, microbatches=4, pipeline_schedule=kind)
    optimizer = adamw(reference.parameters())
    uneven, other, none = data.clone(), data.clone(), data.clone()
    uneven[0, :5] = -100
    other[: len(data) // dp, 3:] = -100
    none[:2] = -100
    worst = []
    for labels in (uneven, other, none):
        own = {"input_ids": my_part(data, mesh)["input_ids"], "labels": my_part(labels, mesh)["labels"]}
        loss = engine.train_batch(**own).item()
        optimizer.zero_grad()
        expected = reference(input_ids=data, labels=labels).loss
        expected.backward()
        found, wanted = schedule.full_state("grad"), {name: p.grad for name, p in reference.named_parameters()}
        worst += [abs(loss - expected.item()), *(float((found[name] - grad).abs().max()) for name, grad in wanted.items())]
        optimizer.step()
    return worst


@pytest.mark.parametrize(
    ("layout", "kind", "per_rank"),
    [
        ({"pp": 2, "dp": 2}, "1f1b", 1),
        pytest.param({"pp": 2, "dp": 2}, "interleaved", 2, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, "1f1b", 1, marks=pytest.mark.slow),
    ],
)
def test_losses_are_means_over_the_labels_of_all_parts(layout: dict[str, int], kind: str, per_rank: int) -> None:
    for worst in run_distributed(_labels, 4, layout, kind, per_rank):
        assert max(worst) < 1e-5


def _smaller(rank: int, kind: str, per_rank: int) -> list[float]:
    """Differences of the losses of batches of fewer rows than the engine was built for."""
    mesh = mesh_of(pp=2)
    data = tokens(1)[0]
    model = gpt2()
    reference = copy.deepcopy(model)
    schedule = scheduled(model, mesh, my_part(data[:2], mesh), per_rank)
    engine: Any = build(schedule, "torch", optimizer=adamw, microbatches=4, pipeline_schedule=kind)
    optimizer = adamw(reference.parameters())
    differences = []
    for rows in (8, 7, 3, 1, 8):
        loss = engine.train_batch(input_ids=data[:rows], labels=data[:rows])
        optimizer.zero_grad()
        expected = reference(input_ids=data[:rows], labels=data[:rows]).loss
        expected.backward()
        optimizer.step()
        differences.append(abs(loss.item() - expected.item()))
    return differences


@pytest.mark.parametrize(
    ("kind", "per_rank"),
    [("1f1b", 1), *(pytest.param(kind, 2, marks=pytest.mark.slow) for kind in ("interleaved", "dualpipev"))],
)
def test_the_last_batch_may_be_smaller(kind: str, per_rank: int) -> None:
    for differences in run_distributed(_smaller, 2, kind, per_rank):
        assert max(differences) < 1e-5


def _different_start(rank: int, layout: dict[str, int]) -> str:
    mesh = mesh_of(**layout)
    model = gpt2()
    with torch.no_grad():
        for weight in (model.transformer.wte.weight, model.transformer.ln_f.weight):
            weight.view(-1)[0] += rank
    return message_of(lambda: build(scheduled(model, mesh, my_part(tokens(2)[0], mesh)), "torch", microbatches=2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ({"pp": 2}, r"stages \(0, 1\) have different values, or requires_grad, of the tied 'transformer.wte.weight'"),
        ({"dp": 2}, "the replicas start from different values of 'transformer.wte.weight'"),
        ({"tp": 2}, "the tensor-parallel ranks start from different values of 'transformer.ln_f.weight'"),
    ],
    ids=str,
)
def test_different_starting_values_are_refused(layout: dict[str, int], text: str) -> None:
    import re

    for message in run_distributed(_different_start, 2, layout):
        assert re.search(text, message), message


def _wrong_configuration(rank: int) -> list[str]:
    mesh = mesh_of(pp=2)
    data = tokens(1)[0]

    def attempt(**config: Any) -> str:
        return message_of(lambda: build(scheduled(gpt2(), mesh, my_part(data, mesh)), "torch", **config))

    uncut = scheduled(gpt2(), mesh, my_part(data, mesh))
    uncut.undo()
    twice = scheduled(gpt2(), mesh, my_part(data, mesh))["transformer.h.0"].cut_pipeline_stage().get_top_schedule()
    return [
        attempt(microbatches=2, optimizer=lambda parameters: list(parameters)),
        attempt(microbatches=2, precision="fp8"),
        message_of(lambda: build(uncut, "torch")),
        message_of(lambda: build(twice, "torch", microbatches=4)),
    ]


def test_what_does_not_fit_is_refused_before_it_is_built() -> None:
    for messages in run_distributed(_wrong_configuration, 2):
        assert "optimizer= gave a list; it must return a torch.optim.Optimizer" in messages[0]
        assert "target 'torch' cannot do precision:fp8" in messages[1]
        assert "1 stage on a mesh with pp=2; cut the model into a multiple of 2 stages" in messages[2]
        assert "2 cuts make 3 stages, but the mesh has pp=2" in messages[3]


def _bf16(rank: int) -> tuple[float, float]:
    mesh = mesh_of(pp=2)
    data = tokens(1)
    model = gpt2()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(input_ids=data[0], labels=data[0]).loss.item()
    engine: Any = build(
        scheduled(model, mesh, my_part(data[0], mesh)), "torch", optimizer=adamw, microbatches=2, precision="bf16"
    )
    return engine.train_batch(**my_part(data[0], mesh)).item(), expected


def test_bf16_autocast_crosses_boundaries() -> None:
    for found, expected in run_distributed(_bf16, 2):
        assert found == pytest.approx(expected, abs=2e-3)


def _frozen_start(rank: int) -> list[float]:
    mesh = mesh_of(pp=2)
    data = tokens(1)
    model = gpt2()
    model.transformer.wte.weight.requires_grad_(False)
    for module in (model.transformer.wpe, model.transformer.h[0], model.transformer.h[1]):
        module.requires_grad_(False)
    reference = copy.deepcopy(model)
    engine: Any = build(scheduled(model, mesh, my_part(data[0], mesh)), "torch", optimizer=adamw, microbatches=2, clip=1.0)
    assert (engine.optimizer is None) == (rank == 0)
    optimizer = adamw([p for p in reference.parameters() if p.requires_grad])
    differences = []
    for loss, batch in zip(losses(engine, mesh, data), data, strict=True):
        optimizer.zero_grad()
        expected = reference(input_ids=batch, labels=batch).loss
        expected.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        differences.append(abs(loss - expected.item()))
    return differences


def test_a_stage_without_trainable_parameters() -> None:
    for differences in run_distributed(_frozen_start, 2):
        assert max(differences) < 1e-5


class Counting(nn.Module):
    """Counts its calls in a buffer that its last part reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.n += 1
        return self.b(self.a(x)).pow(2).mean() * self.n.clone()


def _counting(rank: int) -> list[float]:
    mesh = mesh_of(pp=2)
    torch.manual_seed(0)
    model = Counting()
    reference, x = copy.deepcopy(model), torch.randn(8, 4)
    loss = _cut_after_a(model, mesh, {"x": x}, optimizer=adamw, microbatches=4).train_batch(x=x).item()
    return [loss, torch.stack([reference(part) for part in x.chunk(4)]).mean().item()]


def _batches(rank: int) -> list[str]:
    mesh = mesh_of(pp=2, dp=2)
    data = tokens(2)[0]
    part = my_part(data, mesh)
    engine: Any = build(scheduled(gpt2(), mesh, part), "torch", optimizer=adamw, microbatches=2)
    shuffled = {name: value.flip(0) if rank == 3 else value for name, value in part.items()}
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    messages = [message_of(partial(engine.train_batch, **shuffled)), message_of(partial(engine.eval_batch, **shuffled))]
    changed = [name for name, value in engine.module.state_dict().items() if not torch.equal(value, before[name])]
    assert not changed, (changed, messages)
    engine.train_batch(**part)
    return messages


def test_stages_that_are_given_different_rows_are_refused() -> None:
    for messages in run_distributed(_batches, 4):
        assert all("the ranks of replica 1 were given different batches" in message for message in messages)


def _cut_after_a(model: nn.Module, mesh: DeviceMesh, example: dict[str, torch.Tensor], **config: Any) -> Any:
    import slapo_pipeline.plugin
    import slapo_torch.plugin
    from slapo_core import Registry, create_schedule

    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin])
    schedule = create_schedule(model, mesh=mesh, example_inputs=example, plugins=plugins)
    schedule["a"].cut_pipeline_stage()
    return build(schedule, "torch", **config)


def test_a_changed_buffer_is_sent_as_it_was_at_its_micro_batch() -> None:
    for found, expected in run_distributed(_counting, 2):
        assert found == pytest.approx(expected, rel=1e-6)


class Failing(torch.optim.SGD):
    """Raises in its second step."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        if self.steps == 2:
            raise ValueError("no second step")
        super().step()


class Sparse(nn.Module):
    """Begins with an embedding of sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)).pow(2).mean()


def _update_errors(rank: int) -> list[str]:
    mesh = mesh_of(pp=2)
    torch.manual_seed(0)
    x, tokens_ = torch.randn(8, 4), torch.arange(8) % 4
    one = _cut_after_a(
        Counting(), mesh, {"x": x}, optimizer=partial(Failing if rank else torch.optim.SGD, lr=0.1), microbatches=2
    )
    sparse = _cut_after_a(Sparse(), mesh, {"x": tokens_}, optimizer=partial(torch.optim.SGD, lr=0.1), microbatches=2, clip=1.0)
    steps = [message_of(partial(one.train_batch, x=x)) for _ in range(3)]
    return [*steps, message_of(partial(sparse.train_batch, x=tokens_))]


def test_an_error_of_one_ranks_update_fails_all() -> None:
    for first, second, third, sparse in run_distributed(_update_errors, 2):
        assert first == third == "no error"
        assert "no second step" in second
        assert "the sparse gradient of 'a.weight' cannot be clipped" in sparse
