"""``build(..., weights=...)`` in one process: the values are those of ``from_pretrained``, and what does not fit is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import slapo
from slapo_core import BuildError, Registry, ShardSpec, hookimpl, parameter_facts, successor
from slapo_weights.load import Weights, fill
from tests.zoo.families import FAMILIES

from .saved_models import IDS, SIZES, WIDTHS, class_of, config, empty, expected, logits_and_gradients, save


def loaded(model: Any, weights: Any) -> Any:
    """The model, built."""
    return slapo.build(slapo.create_schedule(model), weights=weights).module


def check(module: Any, theirs: Any, distance: float = 0.0) -> None:
    """Logits and gradients are the same."""
    (ours, gradients), (logits, others) = logits_and_gradients(module), logits_and_gradients(theirs)
    assert (ours - logits).abs().max() <= distance
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=distance and 1e-4, atol=distance, msg=name)


def assert_same(module: Any, theirs: Any) -> None:
    """Every value is the same, to the bit."""
    found, expected = module.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("size", ["5GB", "20KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("name", ["llama", "tied", "gpt2", "mixtral"])
def test_a_model_is_what_from_pretrained_makes(name: str, size: str, tmp_path: Path) -> None:
    save(name, tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors").exists() is (size == "5GB")
    model = empty(name)
    check(loaded(model, tmp_path), expected(name, tmp_path))
    if name in ("tied", "gpt2"):
        assert model.get_input_embeddings().weight is model.lm_head.weight


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in sorted(FAMILIES)])
def test_every_family_is_read_as_from_pretrained_reads_it(name: str, tmp_path: Path) -> None:
    original: Any = FAMILIES[name].model()
    original.save_pretrained(tmp_path)
    with slapo.init_empty_weights():
        model = type(original)(original.config)
    assert_same(loaded(model, tmp_path), type(original).from_pretrained(tmp_path))


def test_experts_that_are_stacked_in_the_file_are_read(tmp_path: Path) -> None:
    theirs = expected("mixtral", save("mixtral", tmp_path))
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert "model.layers.0.mlp.experts.down_proj" in load_file(tmp_path / "stacked" / "model.safetensors")
    check(loaded(empty("mixtral"), tmp_path / "stacked"), theirs)


def test_layers_that_the_model_lacks_are_unexpected_once(tmp_path: Path) -> None:
    save("mixtral", tmp_path, num_hidden_layers=3)
    with pytest.raises(
        BuildError, match=r"not this model's: 9 unexpected: model.layers.2.input_layernorm.weight, .*gate_up_proj"
    ):
        loaded(empty("mixtral"), tmp_path)
    module = loaded(empty("mixtral"), Weights(tmp_path, unexpected="model.layers.2.*"))
    theirs = dict(expected("mixtral", tmp_path).named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in module.named_parameters())


def test_two_tensors_of_one_name_in_the_model_are_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "norm.weight": torch.ones(32)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        BuildError, match="model.norm.weight and norm.weight are both model.norm.weight in the model; one of them"
    ):
        loaded(empty("llama"), tmp_path)


class Sevens:
    @hookimpl
    def slapo_before_build(self, config: dict[str, Any]) -> Any:
        given = config.pop("sevens")

        def fill_norms(program: Any, parts: list[nn.Module], device: str) -> None:
            norm = parts[0].get_submodule(given)
            norm.weight = successor(norm.weight, torch.full(norm.weight.shape, 7.0, device=device))
            assert not any(parameter.is_meta for parameter in norm.parameters())

        return fill_norms


def test_any_plugin_may_fill_before_the_rest_is_initialised() -> None:
    sch = slapo.create_schedule(empty("llama"), plugins=Registry([Sevens()]))
    module = slapo.build(sch, sevens="model.norm").module
    assert bool((module.model.norm.weight == 7).all())
    assert not any(parameter.is_meta for parameter in module.parameters())


def test_both_ends_of_a_tie_that_a_step_cut_are_read(tmp_path: Path) -> None:
    save("tied", tmp_path)
    sch = slapo.create_schedule(empty("tied"))
    with slapo.init_empty_weights():
        sch["lm_head"].replace(nn.Linear(32, 96, bias=False))
    module = slapo.build(sch, weights=tmp_path).module
    assert module.lm_head.weight is not module.model.embed_tokens.weight
    assert torch.equal(module.lm_head.weight, module.model.embed_tokens.weight)
    assert torch.equal(module(IDS).logits, expected("tied", tmp_path)(IDS).logits)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_modules_that_steps_replaced_find_their_weights(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    sch = slapo.create_schedule(empty(name), example_inputs={"input_ids": IDS, "labels": IDS})
    sch["model.layers.0"].checkpoint()
    sch.use_kernels()
    check(slapo.build(sch, weights=tmp_path).module, expected(name, tmp_path), 1e-5)


def test_a_model_that_was_traced_finds_its_weights(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    sch = slapo.create_schedule(empty("mixtral"), example_inputs={"input_ids": IDS, "labels": IDS})
    sch.trace(recursive=False)
    found = slapo.build(sch, weights=tmp_path).module.state_dict()
    theirs = expected("mixtral", tmp_path).state_dict()
    assert found.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(found[name], theirs[name])] == []


SPECS = {"rows": (0, (96,)), "columns": (1, (32,)), "blocks": (1, (16, 16)), "uneven": (0, (96,))}


@pytest.mark.parametrize("kind", SPECS)
def test_each_rank_reads_its_part_and_no_more(kind: str, tmp_path: Path) -> None:
    """The parts of a tensor of the file, whatever way it is dealt out; all other tensors are whole."""
    save("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    dim, blocks = SPECS[kind]
    want, others = tensors["lm_head.weight"], sum(each.nbytes for each in tensors.values()) - 96 * 32 * 4
    dealt = (((0, 40),), ((40, 70), (90, 96)), ((60, 96),)) if kind == "uneven" else None
    for rank in range(3 if dealt else 2):
        model = empty("llama")
        slapo.create_schedule(model)
        spec = ShardSpec(dim, (96, 32), rank, 3 if dealt else 2, blocks, uneven_ranges=dealt)
        old = model.lm_head.weight
        model.lm_head.weight = successor(old, spec.local(old.detach()), spec=spec)
        part = spec.local(want)
        assert fill(model, [model], Weights(tmp_path)) == others + part.nbytes
        assert torch.equal(model.lm_head.weight, part)


def test_parts_of_stacked_experts_are_read_alone(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    want = expected("mixtral", tmp_path).model.layers[0].mlp.experts.gate_up_proj.detach()
    slapo.create_schedule(model := empty("mixtral"))
    whole = fill(model, [model], Weights(tmp_path))
    for rank in range(2):
        slapo.create_schedule(model := empty("mixtral"))
        experts = model.model.layers[0].mlp.experts
        spec = ShardSpec(1, tuple(want.shape), rank, 2, (64, 64))
        old = experts.gate_up_proj
        experts.gate_up_proj = successor(old, spec.local(old.detach()), spec=spec)
        assert whole - fill(model, [model], Weights(tmp_path)) == want.nbytes // 2
        assert torch.equal(experts.gate_up_proj, spec.local(want))


def test_a_padded_vocabulary_has_zeros_behind_the_files_rows(tmp_path: Path) -> None:
    save("tied", tmp_path)
    with slapo.init_empty_weights():
        model = class_of("tied")(config("tied"))
        model.model.embed_tokens.weight = nn.Parameter(torch.empty(104, 32))
        model.lm_head.weight = model.model.embed_tokens.weight
    module = loaded(model, tmp_path)
    theirs = expected("tied", tmp_path)
    assert torch.equal(module(IDS).logits[..., :96], theirs(IDS).logits)
    assert not module.lm_head.weight[96:].any()


def test_a_vocabulary_is_not_cut(tmp_path: Path) -> None:
    save("llama", tmp_path)
    model = empty("llama")
    with slapo.init_empty_weights():
        model.lm_head.weight = nn.Parameter(torch.empty(88, 32))
    with pytest.raises(BuildError, match=r"1 mis-shaped: lm_head.weight is \[96, 32\] for \[88, 32\]; give"):
        loaded(model, tmp_path)


def test_only_a_vocabulary_is_padded(tmp_path: Path) -> None:
    save("llama", tmp_path)
    with slapo.init_empty_weights():
        model = class_of("llama")(config("llama"))
        model.model.norm.weight = nn.Parameter(torch.empty(40))
    with pytest.raises(BuildError, match=r"1 mis-shaped: model.norm.weight is \[32\] for \[40\]; give"):
        loaded(model, tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_file_of_the_base_model_goes_into_one_with_a_head(name: str, tmp_path: Path) -> None:
    """Missing tensors are initialised as without weights if ``missing`` names them."""
    source = save(name, tmp_path / "head")
    base = expected(name, source).base_model
    base.save_pretrained(tmp_path / "base")
    model = empty(name)
    if name == "gpt2":
        check(loaded(model, tmp_path / "base"), expected(name, source))
        return
    with pytest.raises(BuildError, match="not this model's: 1 missing: lm_head.weight; give"):
        loaded(model, tmp_path / "base")
    loaded(model, Weights(tmp_path / "base", missing=("lm_head.*",)))
    slapo.build(slapo.create_schedule(fresh := empty(name)))
    assert torch.equal(model.lm_head.weight, fresh.lm_head.weight)
    assert torch.equal(model.model.norm.weight, base.norm.weight)
    assert not torch.equal(model.model.norm.weight, fresh.model.norm.weight)


def test_a_file_with_a_head_goes_into_the_base_model(tmp_path: Path) -> None:
    from transformers import LlamaModel

    save("llama", tmp_path)
    with slapo.init_empty_weights():
        model = LlamaModel(config("llama"))
    with pytest.raises(BuildError, match="not this model's: 1 unexpected: lm_head.weight; give"):
        loaded(model, tmp_path)
    module = loaded(model, Weights(tmp_path, unexpected="lm_head.*"))
    assert torch.equal(module(IDS).last_hidden_state, expected("llama", tmp_path).model(IDS).last_hidden_state)


def test_all_that_is_wrong_is_told_at_once_and_nothing_changes(tmp_path: Path) -> None:
    save("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.extra"] = torch.ones(1)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].half()
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.ones(16, 32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = empty("llama")
    before = dict(model.named_parameters())
    sch = slapo.create_schedule(model)
    with pytest.raises(BuildError) as caught:
        slapo.build(sch, weights=tmp_path)
    assert str(caught.value) == (
        f"the weights in {tmp_path} are not this model's: 2 missing: model.layers.0.mlp.up_proj.weight, model.norm.weight; "
        "1 mis-shaped: model.layers.1.self_attn.q_proj.weight is [16, 32] for [32, 32]; "
        "1 mis-typed, which cast=True casts: lm_head.weight is float16 for float32; "
        "1 unexpected: model.extra; give the model's own, or say with slapo.Weights what may differ"
    )
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    slapo.build(sch)  # nothing of the refused build is left
    assert not model.model.norm.weight.is_meta
    assert bool((model.model.norm.weight == 1).all())


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(BuildError, match=r"39 missing: model.embed_tokens.weight, .* and 19 more; 1 unexpected: x; give"):
        loaded(empty("llama", num_hidden_layers=4), tmp_path)


def test_another_floating_point_type_is_cast_where_that_is_asked_for(tmp_path: Path) -> None:
    save("llama", tmp_path)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = loaded(empty("llama"), Weights(tmp_path, cast=True)).state_dict()
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in tensors.items())
    save_file({**tensors, "lm_head.weight": torch.ones(96, 32, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(BuildError, match="1 mis-typed: lm_head.weight is int32 for float32; give"):
        loaded(empty("llama"), Weights(tmp_path, cast=True))


def test_copies_of_a_tied_weight_have_to_be_equal(tmp_path: Path) -> None:
    save("tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    loaded(empty("tied"), tmp_path)
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = empty("tied")
    with pytest.raises(BuildError, match="several values for one tensor: model.embed_tokens.weight = lm_head.weight$"):
        loaded(model, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())


class Counting(nn.Module):
    """Has buffers that are saved, one of them of a layer, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        parameter_facts(self.table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.table


@pytest.mark.parametrize("include_buffers", [False, True])
def test_buffers_that_are_saved_are_read(include_buffers: bool, tmp_path: Path) -> None:
    reference = Counting()
    reference(torch.randn(8, 4))
    reference.steps += 5
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    with slapo.init_empty_weights():
        model = Counting()
    if include_buffers:
        for module in (model, model.layers[1]):
            for name in module._buffers.keys() - {"table"}:
                module._buffers[name] = module._buffers[name].to("meta")
    loaded(model, tmp_path)
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.table, torch.arange(4.0))


def test_buffers_go_where_the_weights_go(tmp_path: Path) -> None:
    save_file(Counting().state_dict(), tmp_path / "model.safetensors")
    with slapo.init_empty_weights():
        model = Counting()
    slapo.create_schedule(model)
    parameter_facts(model.table).tags.add("mine")
    fill(model, [model], Weights(tmp_path), device="meta")
    assert all(buffer.is_meta for buffer in model.buffers())
    assert parameter_facts(model.table).tags == {"mine"}


def test_what_has_values_keeps_them(tmp_path: Path) -> None:
    save("llama", tmp_path)
    model = empty("llama")
    model.lm_head = nn.Linear(32, 96, bias=False)
    weight, values = model.lm_head.weight, model.lm_head.weight.detach().clone()
    match = (
        "1 parameters have values: lm_head.weight, which are not those of the weights in .*; make them inside of slapo.init_"
    )
    with pytest.raises(BuildError, match=match):
        loaded(model, tmp_path)
    assert model.model.norm.weight.is_meta
    module = loaded(model, Weights(tmp_path, unexpected="lm_head.*"))
    assert module.lm_head.weight is weight
    assert torch.equal(weight, values)
    assert torch.equal(module.model.norm.weight, expected("llama", tmp_path).model.norm.weight)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"source": None}, "the source of weights is None; give a file or a folder"),
        ({"cast": "no"}, "cast is 'no'; give True or False"),
        ({"missing": 3}, "missing is 3; give patterns of names"),
        ({"unexpected": [3]}, r"unexpected is \[3\]; give patterns of names"),
    ],
)
def test_what_weights_are_given_wrongly_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    save("llama", tmp_path)
    with pytest.raises(BuildError, match=message):
        loaded(empty("llama"), Weights(**{"source": tmp_path, **given}))


def test_weights_for_a_model_that_has_values_are_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    with pytest.raises(BuildError, match="the model has values; make it inside of slapo.init_empty_weights"):
        loaded(class_of("llama")(config("llama")), tmp_path)


def test_frozen_parameters_stay_frozen_and_facts_stay(tmp_path: Path) -> None:
    save("llama", tmp_path)
    model = empty("llama")
    model.lm_head.weight.requires_grad_(False)
    sch = slapo.create_schedule(model)
    parameter_facts(model.model.norm.weight).tags.add("mine")
    slapo.build(sch, weights=tmp_path)
    assert not model.lm_head.weight.requires_grad
    assert model.model.norm.weight.requires_grad
    assert parameter_facts(model.model.norm.weight).tags == {"mine"}
    assert parameter_facts(model.model.norm.weight).names == ("model.norm.weight",)


@pytest.mark.parametrize(
    ("weights", "match"), [(3, "weights is a int; give a file, a folder"), ("nowhere", "no weights at nowh")]
)
def test_what_is_no_place_is_refused(weights: Any, match: str) -> None:
    with pytest.raises(BuildError, match=match):
        loaded(empty("llama"), weights)


def converted_llama(operation: Any, tmp_path: Path) -> Any:
    """An empty Llama whose files have other weights for ``up_proj``, of which Transformers makes them so."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    class ConvertedConfig(LlamaConfig):
        model_type = "converted-llama"

    class ConvertedLlama(LlamaForCausalLM):
        config_class = ConvertedConfig

    converter = WeightConverter("mlp.w13.weight", "mlp.up_proj.weight", [operation])
    register_checkpoint_conversion_mapping("ConvertedLlama", [converter], overwrite=True)
    save("llama", tmp_path)
    tensors = {name.replace("up_proj", "w13"): each for name, each in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with slapo.init_empty_weights():
        return ConvertedLlama(ConvertedConfig(**config("llama").to_diff_dict()))


def test_rows_in_another_order_are_read_in_parts(tmp_path: Path) -> None:
    from transformers.core_model_loading import Interleave

    model = converted_llama(Interleave(dim=0), tmp_path)
    loaded(model, tmp_path)
    assert_same(model, type(model).from_pretrained(tmp_path))


def test_projections_of_one_that_are_turned_for_rotation_are_read_in_parts(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = dict(
        **{**SIZES, **WIDTHS, "num_key_value_heads": 4, "num_hidden_layers": 1},
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    sees = {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "num_attention_heads": 2, "num_hidden_layers": 1}
    ids = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    of = AutoConfig.for_model("kimi_k25", text_config=text, vision_config={**sees, **sizes}, projection_hidden_size=32, **ids)
    torch.manual_seed(0)
    saved = AutoModelForImageTextToText.from_config(of)
    saved.save_pretrained(tmp_path)
    assert any("wqkv" in name for name in load_file(tmp_path / "model.safetensors")), "fused, and its rows as they were trained"
    with slapo.init_empty_weights():
        model = type(saved)(of)
    loaded(model, tmp_path)
    assert_same(model, saved)


def test_a_conversion_that_needs_whole_tensors_is_refused_by_name(tmp_path: Path) -> None:
    from transformers.core_model_loading import ConversionOps

    class Sorted(ConversionOps):
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
            [[tensor]] = input_dict.values()
            return {target_patterns[0]: tensor.sort(0).values}

    match = (
        r"2 that cannot be read in parts: model.layers.0.mlp.up_proj.weight, which Transformers makes of model.layers.0.mlp.w13"
    )
    with pytest.raises(BuildError, match=match):
        loaded(converted_llama(Sorted(), tmp_path), tmp_path)
