"""Training and checkpoints of shards that are not equal parts: an odd vocabulary, key heads in copies."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_testing import run_distributed

from .layouts import adamw, mesh_of, message_of

pytestmark = pytest.mark.multiproc

VOCABULARY = 33


def _llama(intermediate: int = 15) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": intermediate,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "head_dim": 4,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True, use_cache=False))


def _engine(layout: dict[str, int], intermediate: int, **config: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    plugins, mesh = (
        Registry(
            [slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_sharding.plugin, slapo_torch.plugin]
        ),
        mesh_of(**layout),
    )
    ids = torch.randint(VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(1))
    own = ids.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    batch = {"input_ids": own, "labels": own}
    sch = create_schedule(_llama(intermediate), mesh=mesh, example_inputs=batch, plugins=plugins)
    sch.tensor_parallel()
    if layout.get("pp", 1) > 1:
        sch["model.layers.0"].cut_pipeline_stage()
    return sch, build(sch, "torch", optimizer=adamw, clip=0.1, microbatches=2, **config), batch


def _beside_reference(rank: int, layout: dict[str, int], path: str, kind: str = "ddp", intermediate: int = 15) -> list[float]:
    sch, engine, batch = _engine(layout, intermediate, data_parallel=kind)
    reference = _llama(intermediate)
    optimizer = adamw(reference.parameters())
    ids = torch.randint(VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        loss = engine.train_batch(**batch)
        optimizer.zero_grad()
        expected = reference(input_ids=ids, labels=ids).loss
        expected.backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), atol=1e-5, rtol=1e-5)
        assert engine.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    trained = sch.full_state()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), atol=1e-5, rtol=1e-4)
    engine.save(path)
    kept = copy.deepcopy(engine.module.state_dict())
    going_on = [engine.train_batch(**batch).item() for _ in range(2)]
    _, again, _ = _engine(layout, intermediate, data_parallel=kind)
    again.load(path)
    for name, value in again.module.state_dict().items():
        assert torch.equal(value, kept[name])
    assert [again.train_batch(**batch).item() for _ in range(2)] == going_on
    return going_on


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        pytest.param({"tp": 4}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_and_going_on(layout: dict[str, int], tmp_path: Path) -> None:
    ranks = torch.tensor(list(layout.values())).prod().item()
    results = run_distributed(_beside_reference, int(ranks), layout, str(tmp_path))
    assert all(result == results[0] for result in results)


@pytest.mark.slow
def test_rows_of_uneven_parts_are_shared_out_over_replicas(tmp_path: Path) -> None:
    """The vocabulary's and the key heads' parts; each copy of a key head counts once in the norm."""
    results = run_distributed(_beside_reference, 4, {"dp": 2, "tp": 2}, str(tmp_path), "fsdp", 16)
    assert all(result == results[0] for result in results)


def _uneven_columns(rank: int) -> str:
    return message_of(lambda: _engine({"dp": 2, "tp": 2}, 15, data_parallel="fsdp"))


@pytest.mark.slow
def test_uneven_columns_are_not_shared_out_over_replicas() -> None:
    for message in run_distributed(_uneven_columns, 4):
        assert "'model.layers.0.mlp.down_proj.weight' is dealt out unevenly along dim 1" in message


def _elsewhere(rank: int, layout: dict[str, int], path: str, kind: str) -> list[float]:
    _, engine, batch = _engine(layout, 16 if kind == "fsdp" else 15, data_parallel=kind)
    engine.load(path)
    return [engine.train_batch(**batch).item() for _ in range(2)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "other", "kind"),
    [
        ({"tp": 2}, {"pp": 2}, "ddp"),
        ({"pp": 2}, {"tp": 2}, "ddp"),
        pytest.param({"tp": 4}, {}, "ddp", marks=pytest.mark.slow),
        pytest.param({"tp": 2}, {"tp": 4}, "ddp", marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, {"tp": 2}, "fsdp", marks=pytest.mark.slow),
        pytest.param({"tp": 2}, {"dp": 2, "tp": 2}, "fsdp", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_parts_go_on(layout: dict[str, int], other: dict[str, int], kind: str, tmp_path: Path) -> None:
    """Some parts overlap: the copies of a key head."""
    intermediate = 16 if kind == "fsdp" else 15
    size, its = (int(torch.tensor([1, *each.values()]).prod()) for each in (layout, other))
    expected = run_distributed(_beside_reference, size, layout, str(tmp_path), kind, intermediate)[0]
    for found in run_distributed(_elsewhere, its, other, str(tmp_path), kind):
        assert found == pytest.approx(expected, abs=1e-5)
