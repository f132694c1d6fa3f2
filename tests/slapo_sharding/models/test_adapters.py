"""PEFT adapters: the base is split as without them, the low-rank matrices follow, and frozen parameters stay frozen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import BuildError, build, create_schedule, is_sharded, set_random_seed, shard_spec
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.slapo_torch.layouts import gpt2, mesh_of

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
]

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
ROWS = {"o_proj", "down_proj"}
QV: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
KINDS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": sorted(PROJECTIONS)},
    "q and v": QV,
    "rank-stabilised": {"target_modules": sorted(PROJECTIONS), "use_rslora": True},
    "DoRA": {"target_modules": sorted(PROJECTIONS), "use_dora": True},
    "o and down": {"target_modules": sorted(ROWS)},
    "a head that is trained": {**QV, "modules_to_save": ["lm_head"]},
    "biases": {**QV, "lora_bias": True},
}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False, max_position_embeddings=32))


def adapted_model(kind: str) -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **KINDS[kind]))
    if kind == "rank-stabilised":  # with a second, inactive adapter
        model.add_adapter("other", LoraConfig(r=2, init_lora_weights=False, **QV))
    return model


def trained(rank: int, kind: str, options: dict[str, Any], layout: dict[str, int], config: dict[str, Any]) -> dict[str, Any]:
    """Take two steps beside the unmodified model; return the errors of weights, the split layers and the trained parameters."""
    reference = adapted_model(kind)
    model = copy.deepcopy(reference)
    ids = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    mesh = mesh_of(**layout)
    schedule = create_schedule(model, mesh=mesh, example_inputs=batch)
    if mesh["tp"].size() > 1:
        schedule.tensor_parallel(**options)
    split = {name for name, each in model.named_parameters() if shard_spec(each) is not None}
    if mesh["pp"].size() > 1:
        schedule["base_model.model.model.layers.0"].cut_pipeline_stage()
    engine: Any = build(schedule, "torch", optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **config)
    sgd = torch.optim.SGD([each for each in reference.parameters() if each.requires_grad], lr=0.1)
    own = {name: each.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for name, each in batch.items()}
    before = {name: each.detach().clone() for name, each in reference.named_parameters()}
    for _ in range(2):
        loss = engine.train_batch(**own)
        expected = reference(**batch).loss
        expected.backward()
        sgd.step()
        sgd.zero_grad()
        assert abs(loss.item() - expected.item()) < 1e-5
    found: dict[str, Any] = schedule.full_state()
    apart = {name: float((found[name] - each).abs().max()) for name, each in reference.named_parameters()}
    moved = {name for name, each in before.items() if not each.equal(found[name])}
    held = sum(len(group["params"]) for group in engine.optimizer.param_groups)
    engine.close()
    return {"apart": max(apart.values()), "split": split, "moved": moved, "held": held}


def expected_split(kind: str) -> set[str]:
    """Return the expected splits in the first layer: bases, and the low-rank matrix on the sharded side of each base."""
    found = {name for name in PROJECTIONS if name not in KINDS[kind]["target_modules"]}
    for name in KINDS[kind]["target_modules"]:
        found |= {f"{name}.base_layer", f"{name}.lora_{'A' if name in ROWS else 'B'}.default"}
        if "use_dora" in KINDS[kind] and name not in ROWS:
            found.add(f"{name}.lora_magnitude_vector.default")
    return found


def _check(found: list[dict[str, Any]], kind: str) -> None:
    trains = {name for name, each in adapted_model(kind).named_parameters() if each.requires_grad}
    for one in found:
        assert one["apart"] < 1e-5, one
        assert one["moved"] <= trains
        assert 0 < one["held"] <= len(trains)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["all", "q and v", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*KINDS][2:])])
def test_the_base_is_split_as_without_adapters_and_these_follow(kind: str, sequence_parallel: bool) -> None:
    options = {"sequence_parallel": sequence_parallel}
    found = run_distributed(trained, 2, kind, options, {"tp": 2}, {"microbatches": 2, "clip": 1.0e9})
    _check(found, kind)
    marker, expected = "layers.0.", expected_split(kind)
    if kind == "rank-stabilised" and not sequence_parallel:
        expected |= {f"{name}.lora_B.other" for name in QV["target_modules"]}
    for one in found:
        of_layer = {name.split(marker)[1] for name in one["split"] if marker in name and name.endswith(".weight")}
        assert {name.removesuffix(".weight").split(".", 1)[1] for name in of_layer} == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "config"),
    [
        (2, {"pp": 2}, {"microbatches": 2}),
        (2, {"dp": 2}, {}),
        (2, {"dp": 2}, {"data_parallel": "fsdp"}),
        (4, {"pp": 2, "tp": 2}, {"microbatches": 2}),
        (4, {"dp": 2, "tp": 2}, {"data_parallel": "fsdp"}),
    ],
)
@pytest.mark.parametrize("kind", ["all", "q and v"])
def test_adapters_train_on_layouts(kind: str, ranks: int, layout: dict[str, int], config: dict[str, Any]) -> None:
    _check(run_distributed(trained, ranks, kind, {}, layout, config), kind)


def train_and_save(rank: int, kind: str, layout: dict[str, int], config: dict[str, Any], folder: str) -> list[str]:
    """Train a step, save and load in the way of PEFT; return the file names."""
    from peft import PeftModel

    model = adapted_model(kind)
    ids = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    schedule = create_schedule(model, mesh=mesh_of(**layout), example_inputs=batch)
    if "tp" in layout:
        schedule.tensor_parallel()
    if "pp" in layout:
        schedule["base_model.model.model.layers.0"].cut_pipeline_stage()
    engine: Any = build(schedule, "torch", optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **config)
    engine.train_batch(**batch)
    state: dict[str, Any] = schedule.full_state()
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)
    torch.distributed.barrier()
    loaded = dict(PeftModel.from_pretrained(llama(), folder).named_parameters())
    for name in [name for name, each in adapted_model(kind).named_parameters() if each.requires_grad]:
        assert torch.equal(loaded[name], state[name]), name
    engine.close()
    return sorted(each.name for each in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("layout", "config"),
    [({"tp": 2}, {}), pytest.param({"pp": 2}, {"microbatches": 2}, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("kind", [pytest.param("all", marks=pytest.mark.slow), "a head that is trained"])
def test_exports_load_in_peft(kind: str, layout: dict[str, int], config: dict[str, Any], tmp_path: Path) -> None:
    for files in run_distributed(train_and_save, 2, kind, layout, config, str(tmp_path)):
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(files)


def masked(rank: int) -> dict[str, bool]:
    """Return for each dropout of the first layer's adapters if all ranks have the same mask."""
    from peft import LoraConfig, get_peft_model

    set_random_seed(1, tp_rank=rank)
    model = get_peft_model(llama(), LoraConfig(r=4, lora_dropout=0.5, **KINDS["all"]))
    ids = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    schedule = create_schedule(model, mesh=mesh_of(tp=2), example_inputs={"input_ids": ids})
    schedule.tensor_parallel()
    build(schedule)
    masks: dict[str, torch.Tensor] = {}
    for name in PROJECTIONS:
        layer = next(
            each for path, each in model.named_modules() if path.endswith(f"layers.0.{_place(name)}.lora_dropout.default")
        )
        layer.register_forward_hook(lambda _, args, out, name=name: masks.update({name: (out != 0) | (args[0] == 0)}))
    model(input_ids=ids)
    found: dict[str, bool] = {}
    for name in sorted(masks):
        both = [torch.empty_like(masks[name]) for _ in range(2)]
        torch.distributed.all_gather(both, masks[name])
        found[name] = torch.equal(*both)
    return found


def _place(name: str) -> str:
    return f"{'self_attn' if name in ('q_proj', 'k_proj', 'v_proj', 'o_proj') else 'mlp'}.{name}"


@pytest.mark.slow
def test_dropout_masks_of_adapters_differ_for_sharded_inputs() -> None:
    for found in run_distributed(masked, 2):
        assert found == {name: name not in ROWS for name in PROJECTIONS}


def fused(rank: int) -> set[str]:
    """Return the split layers in the first layer of a GPT-2 with adapters, also on its fused projection."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, init_lora_weights=False, fan_in_fan_out=True, target_modules=["c_attn", "c_proj", "c_fc"])
    model = get_peft_model(gpt2(layers=1), config)
    before, ids = copy.deepcopy(model), torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    schedule = create_schedule(model, mesh=mesh_of(tp=2), example_inputs={"input_ids": ids, "labels": ids})
    schedule.tensor_parallel()
    build(schedule)
    assert_equivalent(before, model, input_ids=ids, labels=ids)
    layer = model.get_submodule("base_model.model.transformer.h.0")
    return {name.removesuffix(".weight") for name, each in layer.named_parameters() if is_sharded(each)}


def test_an_adapter_of_a_fused_projection_is_split_by_parts() -> None:
    for found in run_distributed(fused, 2):
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            adapter = "lora_A" if name.endswith("c_proj") else "lora_B"
            assert {f"{name}.base_layer", f"{name}.{adapter}.default"} <= found


def tied_views() -> nn.Module:
    """Return a model with an adapter of the embedding, and a head with transposed views of it."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True))
    config = LoraConfig(target_modules=["embed_tokens"], ensure_weight_tying=True, init_lora_weights=False)
    return get_peft_model(plain, config)


def views(rank: int) -> None:
    """Replicas train views of a parameter; a build that would copy the views is refused."""
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    example = {"input_ids": ids, "labels": ids}
    for layout, config in (({"tp": 2}, {}), ({"dp": 2}, {"data_parallel": "fsdp"})):
        schedule = create_schedule(tied_views(), mesh=mesh_of(**layout), example_inputs=example)
        if "tp" in layout:
            schedule.tensor_parallel()
        with pytest.raises(BuildError, match=r"'[\w.]*lora_embedding_\w\.default' shares memory with '[\w.]*lm_head"):
            build(schedule, "torch", optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **config)
    model, reference = tied_views(), tied_views()  # a deepcopy would not keep the views
    schedule = create_schedule(model, mesh=mesh_of(dp=2), example_inputs=example)
    engine: Any = build(schedule, "torch", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    sgd = torch.optim.SGD([each for each in reference.parameters() if each.requires_grad], lr=0.1)
    for _ in range(3):
        engine.train_batch(**{name: each.chunk(2)[rank] for name, each in example.items()})
        reference(**example).loss.backward()
        sgd.step()
        sgd.zero_grad()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(schedule.full_state()[name], parameter.detach(), atol=1e-6, rtol=1e-5)


def test_only_whole_replicas_train_views_of_parameters() -> None:
    run_distributed(views, 2)
