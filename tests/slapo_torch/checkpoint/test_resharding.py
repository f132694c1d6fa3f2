"""Checkpoints at another layout: the losses go on as those of one process that nothing interrupted."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_fusion.plugin
import slapo_memory.plugin
import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule, get_cuda_rng_tracker, set_random_seed
from slapo_testing import run_distributed

from ..layouts import gpt2, losses, mesh_of, message_of, my_part, scheduled, tokens

pytestmark = pytest.mark.multiproc
Layout = dict[str, int]

LAYOUTS: list[Layout] = [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}]
FSDP = {"data_parallel": "fsdp"}
FAST = [(0, 1), (1, 2), (3, 0), (2, 3)]


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """A rate and a decay for matrices, others for the rest."""
    held = list(parameters)
    matrices, vectors = [p for p in held if p.dim() > 1], [p for p in held if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-2}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def falling(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def engine_of(layout: Layout, options: dict[str, Any], dropout: float = 0.0) -> tuple[Any, Any]:
    """GPT-2 on a mesh, and the mesh."""
    mesh = mesh_of(**layout)
    schedule = scheduled(gpt2(dropout), mesh, my_part(tokens(1)[0], mesh))
    common = {"optimizer": two_groups, "lr_scheduler": falling, "microbatches": 2, "clip": 0.1}
    return build(schedule, "torch", **common, **options), mesh


def saved(rank: int, layout: Layout, options: dict[str, Any], folder: str) -> list[float]:
    """Two losses, a save, and three more."""
    engine, mesh = engine_of(layout, options)
    data = tokens(1, 5)
    before = losses(engine, mesh, data[:2])
    engine.save(folder, extra={"epoch": 1, "next": [4, 2]})
    return before + losses(engine, mesh, data[2:])


def resumed(rank: int, layout: Layout, options: dict[str, Any], folder: str) -> tuple[list[float], int, Any]:
    """Three losses of an engine that was built of other weights and then loaded."""
    engine, mesh = engine_of(layout, options)
    data = tokens(1, 5)
    losses(engine, mesh, data[3:])
    extra = engine.load(folder)
    return losses(engine, mesh, data[engine.steps :]), engine.steps, extra


@functools.cache
def uninterrupted() -> list[float]:
    """Losses of five steps in one process."""
    model = gpt2()
    optimizer = two_groups(model.parameters())
    rate, found = falling(optimizer), []
    for batch in tokens(1, 5):
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        rate.step()
        found.append(loss.item())
    return found


def size_of(layout: Layout) -> int:
    return math.prod(layout.values())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of each layout, saved when it is first asked for."""
    found: dict[str, str] = {}

    def folder_of(layout: Layout, options: dict[str, Any]) -> str:
        key = f"{layout} {options}"
        if key not in found:
            found[key] = str(tmp_path_factory.mktemp("checkpoint"))
            for values in run_distributed(saved, size_of(layout), layout, options, found[key], timeout=110):
                assert values == pytest.approx(uninterrupted(), abs=1e-5)
        return found[key]

    return folder_of


def check(folders: Any, one: Layout, its: dict[str, Any], other: Layout, options: dict[str, Any]) -> None:
    folder = folders(one, its)
    for values, steps, extra in run_distributed(resumed, size_of(other), other, options, folder, timeout=110):
        assert values == pytest.approx(uninterrupted()[2:], abs=1e-5)
        assert steps == 5
        assert extra == {"epoch": 1, "next": [4, 2]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(i, j, marks=() if (i, j) in FAST else pytest.mark.slow, id=f"{LAYOUTS[i]} to {LAYOUTS[j]}")
        for i in range(5)
        for j in range(5)
    ],
)
def test_losses_go_on_at_any_layout(one: int, other: int, folders: Any) -> None:
    check(folders, LAYOUTS[one], {}, LAYOUTS[other], {})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("one", "its", "other", "options"),
    [
        ({"dp": 2}, FSDP, {"pp": 2}, {}),
        ({"tp": 2}, {}, {"dp": 2}, FSDP),
        pytest.param({"dp": 2, "tp": 2}, FSDP, {"dp": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "tp": 2}, {}, {"dp": 2, "tp": 2}, FSDP, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "pp": 2}, FSDP, {"dp": 4}, FSDP, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_losses_go_on_with_rows_of_replicas(
    one: Layout, its: dict[str, Any], other: Layout, options: dict[str, Any], folders: Any
) -> None:
    check(folders, one, its, other, options)


def exactly(rank: int, layout: Layout, options: dict[str, Any], folder: str) -> tuple[list[float], list[float]]:
    """Losses with dropout behind a save, and those of another engine behind a load; every bit counts."""
    set_random_seed(3, dp_rank=rank if "dp" in layout else None, tp_rank=rank if "tp" in layout else None)
    data = tokens(1, 5)
    engine, mesh = engine_of(layout, options, dropout=0.1)
    losses(engine, mesh, data[:2])
    engine.save(folder)
    expected = losses(engine, mesh, data[2:])
    engine, mesh = engine_of(layout, options, dropout=0.1)
    engine.load(folder)
    return expected, losses(engine, mesh, data[2:])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("layout", "options"), [({"tp": 2}, {}), ({"pp": 2}, {}), ({"dp": 2}, {}), ({"dp": 2}, FSDP)], ids=str)
def test_the_same_layout_goes_on_to_the_bit(layout: Layout, options: dict[str, Any], tmp_path: Path) -> None:
    for expected, found in run_distributed(exactly, 2, layout, options, str(tmp_path)):
        assert found == expected


def drawn(rank: int, layout: Layout, folder: str, saves: bool) -> list[float]:
    """Numbers that each rank draws behind a load: of the default generator, and of the tracker's."""
    engine, _ = engine_of(layout, {})
    set_random_seed(3, **{f"{axis}_rank": rank for axis in layout})
    if saves:
        engine.save(folder)
    engine.load(folder)
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(()).item()
    return [torch.rand(()).item(), tracked]


def test_random_numbers_of_another_layout_differ_where_they_should(tmp_path: Path) -> None:
    ((own, _),) = run_distributed(drawn, 1, {}, str(tmp_path), True)
    (first, tracked), (second, other) = run_distributed(drawn, 2, {"tp": 2}, str(tmp_path), False)
    assert first == second != own
    assert tracked != other
    again = run_distributed(drawn, 2, {"tp": 2}, str(tmp_path), False)
    assert again == [[first, tracked], [second, other]]
    (first, _), (second, _) = run_distributed(drawn, 2, {"dp": 2}, str(tmp_path), False)
    assert first != second


def blocks(rank: int, folder: str, given: dict[str, Any]) -> list[list[float]]:
    """The shards of a rank whose weight is cut in a way, behind a step, and what it has whole then."""
    torch.manual_seed(0)
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin, slapo_torch.plugin])
    sch = create_schedule(nn.Sequential(nn.Linear(12, 12, bias=False)), mesh=mesh_of(tp=2), plugins=plugins)
    sch["0"].shard("weight", axis=0, gathered=False, **given).sync("bwd_post", "all_reduce")
    engine: Any = build(
        sch, "torch", optimizer=two_groups, loss_fn=lambda outputs, labels: outputs.square().mean(), check=False
    )
    if not Path(folder, "slapo.json").exists():
        engine.train_batch(input=torch.ones(2, 12), labels=torch.ones(2))
        engine.save(folder)
    engine.load(folder)
    (state,) = engine.optimizer.state.values()
    full = sch.full_state()["0.weight"]
    assert full is not None
    spec = sch["0"].mod.weight._slapo_facts.spec
    mine = [each.flatten().tolist() for each in (state["exp_avg"], state["exp_avg_sq"])]
    dist.barrier()
    return [full.flatten().tolist(), *mine, [float(each) for pair in spec.ranges() for each in pair]]


def test_shards_cut_in_other_blocks_are_read_where_they_lie(tmp_path: Path) -> None:
    """They have the same shape, and other rows."""
    whole = run_distributed(blocks, 2, str(tmp_path), {})
    fused = run_distributed(blocks, 2, str(tmp_path), {"blocks": 3})
    assert fused[0][0] == fused[1][0] == whole[0][0]
    assert fused[0][3] != whole[0][3]
    for which in (1, 2):
        full = torch.tensor(whole[0][which] + whole[1][which]).view(12, 12)
        for found in fused:
            edges = [int(edge) for edge in found[3]]
            rows = torch.cat([full[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)])
            assert found[which] == rows.flatten().tolist()


def other_model(rank: int, folder: str) -> list[str]:
    """Return the messages of loads into models with more, fewer and other tensors."""
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin])

    def made(model: nn.Module) -> Any:
        return build(create_schedule(model, mesh=mesh_of(dp=2), plugins=plugins), "torch", loss_fn=nn.functional.mse_loss)

    made(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))).save(folder)
    other = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 3).double())
    before = other[0].weight.detach().clone()
    message = message_of(lambda: made(other).load(folder))
    return [message, str(torch.equal(other[0].weight, before))]


def test_all_that_another_model_has_different_is_said_at_once(tmp_path: Path) -> None:
    (first, *same), second = run_distributed(other_model, 2, str(tmp_path))
    assert [first, *same] == second
    assert same == ["True"]
    for part in (
        "'2.weight' has shape (2, 4) and type torch.float32 in the checkpoint, shape (3, 4) and type torch.float64 in the",
        "'2.bias' is not in the checkpoint; '1.bias', '1.num_batches_tracked', '1.running_mean', '1.running_var', '1.weight'",
        "; load it into the model it was saved from",
    ):
        assert part in first


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OPTIMIZERS = {"adafactor": adafactor, "momentum": momentum}


def other_state(rank: int, layout: Layout, folder: str, name: str) -> list[Any]:
    """Return the message of ``load``, and losses after it; the first engine saves without a message."""
    mesh, data = mesh_of(**layout), tokens(1, 4)
    model = gpt2()
    model.transformer.h[1].requires_grad_(False)
    schedule = scheduled(model, mesh, my_part(data[0], mesh))
    engine = build(schedule, "torch", optimizer=OPTIMIZERS[name], microbatches=2)
    message = "no error"
    if Path(folder, "slapo.json").exists():
        message = message_of(lambda: engine.load(folder))
    else:
        losses(engine, mesh, data[:2])
        engine.save(folder)
    return [message, losses(engine, mesh, data[2:])]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_other_shapes_goes_with_whole_parameters(name: str, tmp_path: Path) -> None:
    ((_, expected),) = run_distributed(other_state, 1, {}, str(tmp_path), name)
    for message, found in run_distributed(other_state, 2, {"pp": 2}, str(tmp_path), name):
        assert message == "no error"
        assert found == pytest.approx(expected, abs=1e-5)
    for message, found in run_distributed(other_state, 2, {"tp": 2}, str(tmp_path), name):
        assert message == "no error"
        assert found == pytest.approx(expected, abs=1e-5)


class Fused(nn.Module):
    """Two layers in one."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(x)[:, :4]


def steps_of(name: str, sch: Any) -> None:
    """The steps of some schedules of one model."""
    if name == "replaced":
        sch["1"].replace(Fused())
    elif name == "recomputed":
        sch["0"].checkpoint()
        sch["1"].decompose()
    elif name == "compiled":
        sch["0"].compile(backend="eager")


@pytest.mark.parametrize("name", ["recomputed", "compiled", "replaced"])
def test_another_schedule_loads_by_original_names_or_names_what_is_different(name: str, tmp_path: Path) -> None:
    plugins = Registry(
        [slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin, slapo_memory.plugin, slapo_fusion.plugin]
    )
    x = torch.linspace(-1, 1, 8).view(2, 4)
    found: list[list[float]] = []
    for steps in ("none", name):
        torch.manual_seed(len(found))
        sch = create_schedule(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), plugins=plugins)
        steps_of(steps, sch)
        engine: Any = build(sch, "torch", optimizer=two_groups, loss_fn=nn.functional.mse_loss)
        if steps == "none":
            engine.train_batch(input=x, labels=x.flip(1))
            engine.save(tmp_path)
        elif name == "replaced":
            said = (
                "'1.both.bias', '1.both.weight' are not in the checkpoint; '1.bias', '1.weight' are not in the engine; load it"
            )
            assert said in message_of(lambda engine=engine: engine.load(tmp_path))
            return
        else:
            engine.load(tmp_path)
        found.append([engine.train_batch(input=x, labels=x.flip(1)).item() for _ in range(2)])
    assert found[0] == pytest.approx(found[1], abs=1e-6)
