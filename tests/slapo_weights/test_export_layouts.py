"""``export_weights`` of trained engines: ``from_pretrained`` gives what one process would have trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import slapo
from slapo_core import build
from slapo_testing import run_distributed
from slapo_weights import export_weights
from tests.engine_models import batches, my_part, small
from tests.slapo_torch.layouts import adamw, mesh_of, message_of
from tests.zoo.families import FAMILIES

from .test_export import with_fused_layers, with_fused_projections, written

pytestmark = pytest.mark.multiproc
Layout = dict[str, int]
FSDP = {"data_parallel": "fsdp"}


def scheduled(model: nn.Module, mesh: Any, example: dict[str, Any]) -> Any:
    """A model sharded and cut as the mesh wants."""
    schedule = slapo.create_schedule(model, mesh=mesh, example_inputs=example)
    if mesh["tp"].size() > 1:
        schedule.tensor_parallel()
    if mesh["pp"].size() > 1:
        schedule.pipeline(mesh["pp"].size())
    return schedule


def fused(model: nn.Module, mesh: Any, example: dict[str, Any]) -> Any:
    """A Llama in which projections are put together, and kernels are used."""
    schedule = with_fused_layers(model, mesh=mesh, example_inputs=example)
    schedule.use_kernels()
    for mlp in schedule.select("model.layers.*.mlp") if mesh["tp"].size() > 1 else ():
        mlp["gate_up"].shard("weight", axis=0, blocks=2).sync("bwd_post", "all_reduce")
        mlp["down_proj"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    return schedule


def on_layers_of_megatron(model: nn.Module, mesh: Any, example: dict[str, Any]) -> Any:
    """A model whose sharded layers are Megatron's."""
    schedule = slapo.create_schedule(model, mesh=mesh, example_inputs=example)
    schedule.tensor_parallel(backend="megatron")
    return schedule


def exported(
    rank: int, target: str, name: str, layout: Layout, options: dict[str, Any], folder: str, given: dict[str, Any]
) -> list[torch.Tensor]:
    """A step, an export, and what the engine says then: its evaluation loss."""
    mesh, batch = mesh_of(**layout), batches(layout.get("dp", 1))[0]
    made = fused if options.pop("fused", False) else on_layers_of_megatron if options.pop("layers", False) else scheduled
    schedule = made(small(name), mesh, my_part(batch, mesh))
    engine: Any = build(schedule, target, optimizer=adamw, microbatches=2, **options)
    engine.train_batch(**my_part(batch, mesh))
    export_weights(engine, folder, **given)
    loss = engine.eval_batch(**my_part(batch, mesh))
    engine.close()
    return loss.float()


def loss_and_distance(folder: Path, name: str, dp: int) -> tuple[float, float]:
    """Loss of what ``from_pretrained`` gives, and how far its logits are from those of a model that one process trained."""
    batch = batches(dp)[0]
    expected: Any = small(name)
    optimizer = adamw(expected.parameters())
    expected(**batch).loss.backward()
    optimizer.step()
    found = type(expected).from_pretrained(folder).eval()
    expected.eval()
    with torch.no_grad():
        ours, theirs = found(**batch), expected(**batch)
        assert float((theirs.logits - small(name).eval()(**batch).logits).abs().max()) > 0.01
    return ours.loss.item(), float((ours.logits - theirs.logits).abs().max())


SLOW = pytest.mark.slow
CASES = [
    pytest.param("torch", "gpt2", {"tp": 2}, {}, {"max_shard_size": "20KB"}, id="torch tp"),
    pytest.param("torch", "gpt2", {"pp": 2}, {}, {}, id="torch pp"),
    pytest.param("torch", "gpt2", {"dp": 2}, FSDP, {}, id="torch fsdp"),
    pytest.param("torch", "gpt2", {"dp": 2}, {}, {}, marks=SLOW, id="torch dp"),
    pytest.param("torch", "llama", {"tp": 2}, {}, {}, marks=SLOW, id="torch tp llama"),
    pytest.param("torch", "llama", {"pp": 2}, {}, {}, marks=SLOW, id="torch pp llama"),
    pytest.param("torch", "llama", {"dp": 2}, FSDP, {}, marks=SLOW, id="torch fsdp llama"),
    pytest.param("torch", "llama", {"tp": 2}, {"fused": True}, {}, marks=SLOW, id="torch tp fused"),
    pytest.param("torch", "llama", {"dp": 2}, {"fused": True, **FSDP}, {}, marks=SLOW, id="torch fsdp fused"),
    pytest.param("megatron", "llama", {"tp": 2}, {"layers": True}, {}, marks=SLOW, id="megatron layers"),
    pytest.param("torch", "t5", {"tp": 2}, {}, {}, marks=SLOW, id="torch tp t5"),
    pytest.param("torch", "t5", {"pp": 2}, {}, {}, marks=SLOW, id="torch pp t5"),
    pytest.param("torch", "gpt2", {"dp": 2, "tp": 2}, FSDP, {}, marks=SLOW, id="torch fsdp over tp"),
    pytest.param("torch", "gpt2", {"pp": 2, "tp": 2}, {}, {}, marks=SLOW, id="torch pp of tp"),
    pytest.param("deepspeed", "gpt2", {"tp": 2}, {}, {}, id="deepspeed tp"),
    pytest.param("deepspeed", "gpt2", {"pp": 2}, {"config": {"zero_optimization": {"stage": 1}}}, {}, marks=SLOW, id="ds pp"),
    pytest.param(
        "deepspeed",
        "gpt2",
        {"dp": 2},
        {"config": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1}}},
        {},
        marks=SLOW,
        id="deepspeed zero 3",
    ),
    pytest.param("megatron", "gpt2", {"pp": 2}, {}, {}, id="megatron pp"),
    pytest.param("megatron", "gpt2", {"tp": 2}, {}, {}, marks=SLOW, id="megatron tp"),
    pytest.param("megatron", "gpt2", {"dp": 2}, {}, {}, marks=SLOW, id="megatron dp"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("target", "name", "layout", "options", "given"), CASES)
def test_what_was_trained_comes_back(
    target: str, name: str, layout: Layout, options: dict[str, Any], given: dict[str, Any], tmp_path: Path
) -> None:
    ranks = 1
    for size in layout.values():
        ranks *= size
    losses = run_distributed(exported, ranks, target, name, layout, options, str(tmp_path), given, timeout=100)
    loss, distance = loss_and_distance(tmp_path, name, layout.get("dp", 1))
    assert distance < 2e-5
    assert [each.item() for each in losses] == pytest.approx([loss] * ranks, abs=1e-5)
    assert len([*tmp_path.glob("*.safetensors")]) > 1 if given else (tmp_path / "model.safetensors").exists()


def moved(rank: int, name: str, first: Any, second: Any, folder: str) -> tuple[float, float]:
    """Losses of an engine, and of another one with the weights that it exported."""
    losses = []
    for number, (target, layout, options) in enumerate((first, second)):
        mesh, batch = mesh_of(**layout), batches(1)[0]
        with slapo.init_empty_weights(enable=number == 1):
            model = small(name)
        rows = batch if number == 0 or layout.get("dp", 1) == 1 else my_part(batch, mesh)
        given = {"weights": folder} if number else {}
        engine: Any = build(scheduled(model, mesh, rows), target, optimizer=adamw, microbatches=2, **options, **given)
        if number == 0:
            engine.train_batch(**rows)
            export_weights(engine, folder)
        losses.append(engine.eval_batch(**rows).item())
        engine.close()
    return losses[0], losses[1]


MOVES = [
    pytest.param("gpt2", ("torch", {"tp": 2}, {}), ("torch", {"pp": 2}, {}), id="tp to pp"),
    pytest.param("llama", ("torch", {"pp": 2}, {}), ("torch", {"dp": 2}, FSDP), marks=SLOW, id="pp to fsdp"),
    pytest.param("t5", ("torch", {"tp": 2}, {}), ("torch", {"dp": 2}, {}), marks=SLOW, id="tp to dp"),
    pytest.param("gpt2", ("megatron", {"tp": 2}, {}), ("torch", {"pp": 2}, {}), marks=SLOW, id="megatron to torch"),
    pytest.param("llama", ("torch", {"pp": 2}, {}), ("deepspeed", {"tp": 2}, {}), marks=SLOW, id="torch to deepspeed"),
]


@pytest.mark.parametrize(("name", "first", "second"), MOVES)
def test_what_goes_out_comes_in_at_another_layout(name: str, first: Any, second: Any, tmp_path: Path) -> None:
    for before, after in run_distributed(moved, 2, name, first, second, str(tmp_path), timeout=100):
        assert after == pytest.approx(before, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["deepspeed", "megatron"])
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_half_precision_is_written_as_it_runs_unless_its_masters_are_asked_for(
    target: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"precision": "bf16"}
    run_distributed(exported, 2, target, "gpt2", {"dp": 2}, options, str(tmp_path), {"dtype": dtype}, timeout=100)
    import transformers

    weight = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, dtype="auto").lm_head.weight
    assert weight.dtype is (dtype or torch.bfloat16)
    assert torch.equal(weight, weight.bfloat16().to(weight.dtype)) == (dtype is None)


class Uneven(nn.Module):
    """Seven rows over two ranks, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 7), nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x))


def uneven(rank: int, folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Uneven(), mesh=mesh_of(tp=2))
    sch["up"].shard(["weight", "bias"], axis=0, uneven=True, gathered=False).sync("fwd_post", "all_gather", axis=1)
    export_weights(sch, folder)
    torch.manual_seed(0)
    return Uneven().state_dict()


def test_a_schedule_in_unequal_parts(tmp_path: Path) -> None:
    expected = run_distributed(uneven, 2, str(tmp_path))[0]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def without_a_mesh(rank: int, folder: str) -> dict[str, torch.Tensor]:
    """An engine of the ranks that the schedule takes from the world."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sch = slapo.create_schedule(model)
    sch["1"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    engine = build(sch, "torch", optimizer=adamw, loss_fn=nn.functional.mse_loss, check=False)
    export_weights(engine, folder)
    engine.close()
    return expected


def test_ranks_without_a_mesh(tmp_path: Path) -> None:
    expected = run_distributed(without_a_mesh, 2, str(tmp_path))[0]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def split_family(rank: int, name: str, folder: str) -> int:
    """Numbers that a rank holds of a model that was split and that no engine was built of."""
    family = FAMILIES[name]
    sch = slapo.create_schedule(family.model(), mesh=mesh_of(tp=2), example_inputs=family.batch())
    sch.tensor_parallel()
    export_weights(sch, folder, max_shard_size="30KB")
    return sum(parameter.numel() for parameter in sch.mod.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "bloom", "deepseek_v3", "falcon", "gpt_neox", "mixtral", "qwen3_moe", "t5", "vit"])
def test_families_that_were_split_are_what_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    model: Any = FAMILIES[name].model()
    model.save_pretrained(tmp_path / "theirs")
    held = run_distributed(split_family, 2, name, str(tmp_path / "ours"), timeout=100)
    assert max(held) < sum(parameter.numel() for parameter in model.parameters())
    ours, theirs = written(tmp_path / "ours"), written(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


def refused(rank: int, folder: str) -> list[str]:
    """Return the error of each rank."""
    mesh = mesh_of(tp=2)

    def schedule(rows: int = 8) -> Any:
        sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, rows)), mesh=mesh)
        sch["0"].shard(["weight", "bias"], axis=0).sync("fwd_post", "all_gather", axis=1)
        return sch

    def said(source: Any, where: str = "", **options: Any) -> str:
        return message_of(lambda: export_weights(source, folder + where, **options))

    return [
        said(schedule(), f"/{rank}"),
        said(schedule(), dtype=torch.int8 if rank else None),
        said(schedule(8 + 2 * rank)),
        said(schedule(), "/file"),
        said(build(schedule(), check=False)),
    ]


def test_what_is_refused_is_told_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = run_distributed(refused, 2, str(tmp_path))
    where = "BuildError: export_weights: the ranks were given ('{0}/0', 50000000000, 'None') and ('{0}/1', 50000000000, 'None')"
    assert first[0] == second[0] == where.format(tmp_path) + "; give all of them the same"
    assert second[1] == "BuildError: export_weights: dtype is torch.int8; give a floating-point type, e.g. torch.bfloat16"
    assert first[1] == f"BuildError: rank 1 failed: {second[1].removeprefix('BuildError: ')}"
    different = "BuildError: export_weights: the ranks have '0.weight' as (10, 4) and (8, 4); give every rank the same model"
    assert {first[2], second[2]} == {different}
    assert first[3] == f"BuildError: export_weights: '{tmp_path}/file' is a file; give a folder"
    assert second[3] == f"BuildError: rank 0 failed: {first[3].removeprefix('BuildError: ')}"
    alone = "BuildError: export_weights: other ranks have parts of this plain module; give the schedule instead"
    assert {first[4], second[4]} == {alone}
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def broken_off(rank: int, folder: str) -> str:
    """An export whose first rank cannot write a tensor in the middle of it."""
    from slapo_weights.safetensors_files.writer import SafetensorsFile

    sch = slapo.create_schedule(small("gpt2"), mesh=mesh_of(tp=2))
    sch["lm_head"].shard("weight", axis=0)
    kept = SafetensorsFile.write
    SafetensorsFile.write = full  # type: ignore[method-assign]
    try:
        return message_of(lambda: export_weights(sch, folder))
    finally:
        SafetensorsFile.write = kept  # type: ignore[method-assign]


def full(self: Any, name: str, tensor: torch.Tensor) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_on_all_ranks_and_leaves_the_export_before(tmp_path: Path) -> None:
    export_weights(slapo.create_schedule(small("gpt2")), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    first, second = run_distributed(broken_off, 2, str(tmp_path))
    said = f"export_weights: '{tmp_path}' cannot be written to: [Errno 28] No space left on device"
    assert (first, second) == (f"BuildError: {said}", f"BuildError: rank 0 failed: {said}")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def fused_projections(rank: int, folder: str, out: str) -> tuple[list[float], list[str]]:
    """At tp=2 a BERT with query, key and value in one, from a folder to another: losses of two steps, and wrong gradients."""
    family = FAMILIES["bert"]
    batch = {**family.batch(), "labels": family.batch()["input_ids"]}
    reference: Any = type(family.model()).from_pretrained(folder)
    with slapo.init_empty_weights():
        model: Any = type(reference)(reference.config)
    sch = with_fused_projections(model, mesh=mesh_of(tp=2), example_inputs=batch)
    for layer in sch.select("bert.encoder.layer.*.attention"):
        layer["self.qkv.fused_linear"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        layer["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    engine: Any = build(sch, "torch", optimizer=adamw, weights=folder)
    losses, wrong = [], []
    optimizer = adamw(reference.parameters())
    for _ in range(2):
        losses.append(engine.train_batch(**batch).item())
        optimizer.zero_grad()
        loss = reference(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    export_weights(engine, out)
    for name, value in type(reference).from_pretrained(out).state_dict().items():
        if not torch.allclose(value, reference.state_dict()[name], atol=1e-5):
            wrong.append(name)
    engine.close()
    return losses, wrong


@pytest.mark.slow
def test_fused_projections_are_read_trained_and_written_in_parts(tmp_path: Path) -> None:
    original: Any = FAMILIES["bert"].model()
    original.save_pretrained(tmp_path / "in")
    for losses, wrong in run_distributed(fused_projections, 2, str(tmp_path / "in"), str(tmp_path / "out"), timeout=100):
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert losses[2] == pytest.approx(losses[3], rel=1e-5)
        assert losses[2] < losses[0]
        assert wrong == []
