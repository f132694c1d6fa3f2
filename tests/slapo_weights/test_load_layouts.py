"""``build(..., weights=folder)`` on several ranks: logits, gradients and losses are those of ``from_pretrained``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import slapo
from slapo_testing import run_distributed
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

from .saved_models import IDS, empty, expected, logits_and_gradients, save

pytestmark = pytest.mark.multiproc
SLOW = pytest.mark.slow
BATCH = {"input_ids": IDS, "labels": IDS}


def scheduled(name: str, layout: dict[str, int], **changes: Any) -> Any:
    """A model without values, sharded and cut."""
    mesh = mesh_of(**layout)
    sch = slapo.create_schedule(empty(name, **changes), mesh=mesh, example_inputs=BATCH)
    if layout.get("tp", 1) > 1:
        sch.tensor_parallel()
    if layout.get("pp", 1) > 1:
        sch.pipeline(layout["pp"])
    return sch


def split(rank: int, name: str, folder: str) -> tuple[float, list[str]]:
    """At tp=2: distance of the logits, and gradients that differ."""
    sch = scheduled(name, {"tp": 2})
    sch.use_kernels()
    module, _ = slapo.build(sch, weights=folder)
    theirs, gradients = logits_and_gradients(expected(name, folder))
    ours, _ = logits_and_gradients(module)
    found = sch.full_state("grad")
    wrong = [key for key, value in gradients.items() if not torch.allclose(found[key], value, rtol=1e-4, atol=1e-6)]
    return float((ours - theirs).abs().max()), wrong


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=SLOW) for name in ("tied", "gpt2", "mixtral"))])
def test_split_weights_are_those_of_from_pretrained(name: str, tmp_path: Path) -> None:
    save(name, tmp_path, max_shard_size="20KB" if name == "llama" else "5GB")
    for distance, wrong in run_distributed(split, 2, name, str(tmp_path), timeout=100):
        assert distance < 1e-5
        assert wrong == []


def padded(rank: int, folder: str) -> tuple[float, float]:
    """At tp=2: distance of the logits of a tied vocabulary that is padded from 95 rows to 96, and the padding's own size."""
    model = empty("tied", vocab_size=95)
    with slapo.init_empty_weights():
        model.model.embed_tokens.weight = torch.nn.Parameter(torch.empty(96, 32))
        model.model.embed_tokens.num_embeddings = model.lm_head.out_features = 96
        model.lm_head.weight = model.model.embed_tokens.weight
    sch = slapo.create_schedule(model, mesh=mesh_of(tp=2), example_inputs={"input_ids": IDS})
    sch.tensor_parallel()
    module, _ = slapo.build(sch, weights=folder)
    assert module.lm_head.weight.shape[0] == 48
    with torch.no_grad():
        distance = (module(IDS).logits[..., :95] - expected("tied", folder)(IDS).logits).abs().max()
    return float(distance), float(sch.full_state()["lm_head.weight"][95:].abs().max())


def test_a_padded_vocabulary_is_split(tmp_path: Path) -> None:
    save("tied", tmp_path, vocab_size=95)
    for distance, padding in run_distributed(padded, 2, str(tmp_path), timeout=100):
        assert distance < 1e-5
        assert padding == 0


def trained(rank: int, target: str, name: str, layout: dict[str, int], options: dict[str, Any], folder: str) -> list[float]:
    """Losses of three steps."""
    sch = scheduled(name, layout)
    engine = slapo.build(sch, target, optimizer=adamw, weights=folder, **options)
    part = IDS.chunk(layout.get("dp", 1))[sch.mesh["dp"].get_local_rank()]
    losses = [engine.train_batch(input_ids=part, labels=part).item() for _ in range(3)]
    engine.close()
    return losses


def reference(name: str, folder: Path) -> list[float]:
    """The same of what ``from_pretrained`` gives."""
    model = expected(name, folder)
    optimizer, losses = adamw(model.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**BATCH).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


ZERO_3 = {"config": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1}}}
CASES = [
    pytest.param("torch", "gpt2", {"pp": 2}, {"microbatches": 2}, id="torch pp of tied weights"),
    pytest.param("torch", "llama", {"tp": 2}, {}, marks=SLOW, id="torch tp"),
    pytest.param("torch", "llama", {"dp": 2}, {"data_parallel": "fsdp"}, marks=SLOW, id="torch fsdp"),
    pytest.param("deepspeed", "tied", {"tp": 2}, {}, marks=SLOW, id="deepspeed tp"),
    pytest.param("deepspeed", "gpt2", {"pp": 2}, {"microbatches": 2}, marks=SLOW, id="deepspeed pp"),
    pytest.param("deepspeed", "llama", {"dp": 2}, ZERO_3, marks=SLOW, id="deepspeed zero 3"),
    pytest.param("megatron", "llama", {"tp": 2}, {}, marks=SLOW, id="megatron tp"),
    pytest.param("megatron", "gpt2", {"pp": 2}, {"microbatches": 2}, marks=SLOW, id="megatron pp"),
]


@pytest.mark.parametrize(("target", "name", "layout", "options"), CASES)
def test_every_engine_trains_what_from_pretrained_gives(
    target: str, name: str, layout: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    save(name, tmp_path, max_shard_size="20KB")
    want = reference(name, tmp_path)
    assert want[2] < want[0]
    for losses in run_distributed(trained, 2, target, name, layout, options, str(tmp_path), timeout=110):
        assert losses == pytest.approx(want, rel=1e-4)


def stages(rank: int, folder: str, damaged: str) -> tuple[str, str, list[str], list[str]]:
    """Return the messages of refusals, and the layers that have and lack values on this rank of pp=2."""
    sch = scheduled("llama", {"pp": 2}, num_hidden_layers=2)
    first = message_of(lambda: slapo.build(sch, weights=damaged))
    second = message_of(lambda: slapo.build(sch, weights=folder if rank == 0 else f"{folder}/nowhere"))
    slapo.build(sch, weights=folder)
    named = dict(sch.root_module.named_parameters())
    theirs = dict(expected("llama", folder).named_parameters())
    assert all(parameter.is_meta or torch.equal(parameter, theirs[name]) for name, parameter in named.items())
    held = {is_meta: sorted(name for name, each in named.items() if each.is_meta is is_meta) for is_meta in (False, True)}
    return first, second, held[False], held[True]


def test_each_rank_reads_its_stage_and_all_fail_alike(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save("llama", tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    del tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]  # one of each stage
    (tmp_path / "damaged").mkdir()
    save_file(tensors, tmp_path / "damaged" / "model.safetensors", {"format": "pt"})
    folders = str(tmp_path / "whole"), str(tmp_path / "damaged")
    (said, told, held, others), (same, own, rest, those) = run_distributed(stages, 2, *folders, timeout=100)
    assert said == same
    assert "are not this model's: 2 missing: model.embed_tokens.weight, lm_head.weight; give" in said
    assert told.startswith("BuildError: rank 1 failed: no weights at ")
    assert own.startswith("BuildError: no weights at ")
    assert (held, others) == (those, rest)
    assert "model.embed_tokens.weight" in held
    assert "lm_head.weight" in rest


def initialised(rank: int, layout: dict[str, int], name: str) -> dict[str, float]:
    """Return a position-dependent sum of each initialised parameter."""
    sch = scheduled(name, layout)
    slapo.build(sch, seed=3)
    return {
        key: (value.flatten().double() @ torch.arange(1.0, value.numel() + 1).double()).item()
        for key, value in sch.full_state().items()
    }


@pytest.mark.parametrize("layout", [{"tp": 2}, pytest.param({"pp": 2}, marks=SLOW)], ids=["tp", "pp"])
@pytest.mark.parametrize("name", ["gpt2", pytest.param("mixtral", marks=SLOW)])
def test_an_initialiser_gives_the_same_numbers_in_every_layout(layout: dict[str, int], name: str) -> None:
    (want,) = run_distributed(initialised, 1, {}, name, timeout=100)
    for found in run_distributed(initialised, 2, layout, name, timeout=100):
        assert found == want
