"""Models that are sharded by a plan have the outputs and gradients of the unmodified model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, ScheduleError, build, create_schedule, shard_spec
from slapo_sharding import plugin
from slapo_sharding.planning.published_plan import gpt2_plan, tensor_parallel_plan
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.slapo_sharding.logged_warnings import warnings_told
from tests.zoo.families import FAMILIES

pytestmark = pytest.mark.multiproc


IDS = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))


def _schedule(module: nn.Module, **options: Any) -> Schedule:
    return create_schedule(module, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), **options)


def _gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 4, "vocab_size": 32, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **dropout, "loss_type": "ForCausalLMLoss", **options}))


def _llama_like(kind: str, **options: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 32}
    special = {"num_key_value_heads": 4, "head_dim": 4, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **special, **options}))


def _same(model: nn.Module, *, sequence_parallel: bool = False, **options: Any) -> Schedule:
    before = copy.deepcopy(model)
    sch = _schedule(model, **options)
    sch.tensor_parallel(sequence_parallel=sequence_parallel)
    assert len(sch.journal) == 1
    build(sch)
    assert_equivalent(before, model, input_ids=IDS, labels=IDS, use_cache=False)
    return sch


def _gpt2_by_structure(rank: int, options: dict[str, Any]) -> tuple[tuple[int, ...], bool]:
    model = _same(_gpt2(**options)).mod
    return tuple(model.transformer.wte.weight.shape), model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ranks", "options", "vocabulary"),
    [
        (2, {}, 16),
        (4, {}, 8),
        (2, {"vocab_size": 33}, [17, 16]),
        (2, {"tie_word_embeddings": False}, 16),
        (2, {"reorder_and_upcast_attn": True, "attn_implementation": "eager"}, 16),
    ],
    ids=["2 ranks", "4 ranks", "odd vocabulary", "untied", "upcast attention"],
)
def test_gpt2(ranks, options, vocabulary):
    tied = options.get("tie_word_embeddings", True)
    sizes = vocabulary if isinstance(vocabulary, list) else [vocabulary] * ranks
    assert run_distributed(_gpt2_by_structure, ranks, options) == [((size, 16), tied) for size in sizes]


def _llama(rank: int, kind: str, options: dict[str, Any]) -> None:
    _same(_llama_like(kind, **options))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "kind", "options"),
    [
        (2, "llama", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
        (4, "llama", {}),
        (2, "llama", {"tie_word_embeddings": True}),
        (2, "qwen3", {}),
        (2, "phi3", {}),
        (2, "gpt_neox", {}),
    ],
    ids=["grouped queries and biases", "4 ranks", "tied", "norms of heads", "gathered projections", "interleaved heads"],
)
def test_published_plan(ranks, kind, options):
    run_distributed(_llama, ranks, kind, options)


def _newer(rank: int) -> list[str]:
    """Plans of a later Transformers: a key without a module, and an unknown style."""
    model = _llama_like("llama", num_hidden_layers=1)
    model._tp_plan = {**model._tp_plan, "model.layers.*.indexer.up": "colwise"}
    assert any(".shard(" in str(step) for step in _same(model).journal.steps[-1].children)
    with warnings_told() as told:
        sch = _same(_llama_like("granite_swa", num_hidden_layers=1), example_inputs={"input_ids": IDS})
    assert any("mlp.gate_proj" in str(step) for step in sch.journal.steps[-1].children)
    return told


def test_a_published_plan_that_says_more_is_followed_and_one_that_is_not_understood_is_not():
    message = "which is not supported; one is derived instead"
    assert all(any(message in line for line in told) for told in run_distributed(_newer, 2))


def _silent_on_attention(rank: int) -> list[str]:
    model = _llama_like("llama")
    model._tp_plan = {key: style for key, style in model._tp_plan.items() if "self_attn" not in key}
    with warnings_told() as told:
        _same(model)
        _same(_llama_like("llama"))
    return told


def test_an_attention_that_a_published_plan_leaves_whole_is_warned_of_once():
    path = "model.layers.0.self_attn"
    expected = f"tensor_parallel: {path} stays whole on every rank: the published plan of the model leaves it out"
    assert run_distributed(_silent_on_attention, 2) == [[expected]] * 2


def _in_groups(rank: int) -> None:
    """Two separate models on two ranks each."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    example = {"input_ids": IDS, "labels": IDS, "use_cache": False}
    for model, options in (
        (_gpt2(n_layer=1), {}),
        (_llama_like("llama", num_hidden_layers=1), {"sequence_parallel": True, "example_inputs": example}),
    ):
        sch = _same(model, group=group, **options)
        specs = [spec for parameter in sch.mod.parameters() if (spec := shard_spec(parameter)) is not None]
        assert {spec.group for spec in specs} == {group}
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    torch.manual_seed(rank // 2)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    before, x = copy.deepcopy(model), torch.randn(3, 4)
    sch = _schedule(model, group=group)
    sch["0"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    build(sch)
    assert_equivalent(before, model, x)


def test_the_ranks_are_those_of_the_group():
    run_distributed(_in_groups, 4)


def _other_sizes(rank: int) -> str:
    """Both sizes are divisible, but the ranks have different models."""
    sch = _schedule(nn.Sequential(nn.Linear(4, 8 + 4 * rank), nn.Linear(8 + 4 * rank, 4)))
    sch.tensor_parallel({"0": "colwise", "1": "rowwise"})
    with pytest.raises(BuildError) as caught:
        build(sch)
    return str(caught.value)


def test_ranks_that_disagree_about_a_shape_all_say_so():
    first, second = run_distributed(_other_sizes, 2)
    assert first == second
    assert "the parameter '0.weight' of shape (8, 4) on rank 0 and the parameter '0.weight' of shape (12, 4) on rank 1" in first


def _meta(rank: int) -> list[int]:
    from slapo_core import init_empty_weights

    with init_empty_weights():
        model = _llama_like("qwen3", tie_word_embeddings=True)
    sch = _schedule(model)
    sch.tensor_parallel()
    build(sch, seed=1)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return [len(layer.self_attn.q_norm.weight._backward_hooks or ()) for layer in model.model.layers]


def test_a_model_without_weights_is_split_and_then_gets_them():
    assert run_distributed(_meta, 2) == [[1, 1]] * 2


def _replayed(rank: int) -> None:
    from slapo_core import load_schedule

    sch = _schedule(_gpt2())
    sch.tensor_parallel()
    sch.save(f"schedule{rank}.json")
    again = load_schedule(
        _gpt2(), f"schedule{rank}.json", plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin])
    )
    shapes = [[(name, p.shape) for name, p in schedule.mod.named_parameters()] for schedule in (sch, again)]
    assert shapes[0] == shapes[1]
    assert len(again.journal) == 1


def test_a_plan_is_one_step_that_replays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_distributed(_replayed, 2)


def _undone(rank: int) -> None:
    model = _gpt2()
    before = copy.deepcopy(model)
    ids = [id(p) for p in model.parameters()]
    sch = _schedule(model)
    sch.tensor_parallel()
    sch.undo()
    assert ids == [id(p) for p in model.parameters()]
    assert_equivalent(before, model, input_ids=torch.randint(32, (2, 8)), use_cache=False)


def test_undo_takes_the_whole_plan_back():
    run_distributed(_undone, 2)


def _given(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Embedding(4, 4), nn.Linear(4, 4))
    sch = _schedule(model)
    sch.tensor_parallel({"0": "colwise", "2": "rowwise", "3": "embedding_rowwise", "[4]": "colwise_gather_output"})
    build(sch)
    assert [tuple(p.shape) for p in model.parameters()] == [(4, 4), (4,), (4, 4), (4,), (2, 4), (2, 4), (2,)]


def test_a_given_plan():
    run_distributed(_given, 2)


def _refusals(rank: int) -> dict[str, str]:
    messages = {}

    def refused(key: str, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        state = [(name, id(p), len(p._backward_hooks or ())) for name, p in model.named_parameters()]
        sch = _schedule(model)
        with pytest.raises(ScheduleError) as caught:
            sch.tensor_parallel(*args, **kwargs)
        messages[key] = str(caught.value)
        assert state == [(name, id(p), len(p._backward_hooks or ())) for name, p in model.named_parameters()]
        assert not sch.journal

    refused("unknown model", nn.Sequential(nn.Linear(4, 4)))
    refused("traced", torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4))))
    refused("sequence parallel", _gpt2(), sequence_parallel=True)
    refused("style", _gpt2(), {"transformer.h.*.mlp.c_fc": "columnwise"})
    refused("a list", _gpt2(), ["up"])
    refused("no style", _gpt2(), {"up": None})
    refused("styles", _gpt2(), {"up": ["colwise"]})
    refused("a number", _gpt2(), {3: "colwise"})
    refused("no match", _gpt2(), {"transformer.h.*.mlp.fc": "colwise"})
    refused("no path", _gpt2(), {"transformer.h.1.mlp.fc": "colwise"})
    refused("nothing like it", _gpt2(), {"up": "colwise"})
    refused("no cut", nn.Sequential(nn.LayerNorm(4)), {"0": "colwise"})
    refused("heads", _gpt2(n_head=1))
    refused("published style", _llama_like("granite_swa"))
    refused("slopes", _llama_like("apertus"))
    inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4))
    refused("dropout", inner, {"0": "colwise", "2": "rowwise"})
    refused("packed dropout", inner, {"0": "packed_colwise", "2": "packed_rowwise"})
    return messages


def test_an_impossible_plan_is_refused_and_nothing_changes():
    messages = run_distributed(_refusals, 2)[0]
    assert messages["unknown model"].startswith("tensor_parallel(''): no plan is known for Sequential; give example_inputs")
    assert messages["traced"].endswith("call tensor_parallel before trace")
    assert "where the sequence can be split shows when the model runs; give example_inputs" in messages["sequence parallel"]
    assert "'columnwise', which is not supported; did you mean 'colwise'?" in messages["style"]
    assert messages["a list"].startswith("tensor_parallel(''): plan is ['up']; give {path or glob: style}, styles: colwise,")
    assert "'up' has the style None; give {path or glob: style}, styles: colwise," in messages["no style"]
    assert "'up' has the style ['colwise']; give {path or glob: style}" in messages["styles"]
    assert "3 has the style 'colwise'; give {path or glob: style}" in messages["a number"]
    assert (
        "the plan's 'transformer.h.*.mlp.fc' matches no module; did you mean 'transformer.h.*.mlp.c_fc'?"
        in messages["no match"]
    )
    assert "'transformer.h.1.mlp.fc' matches no module; did you mean 'transformer.h.1.mlp.c_fc'? give" in messages["no path"]
    assert "the plan's 'up' matches no module; give a path or glob below 'the model'" in messages["nothing like it"]
    assert "no sharding rule splits a LayerNorm this way" in messages["no cut"]
    assert "1 attention heads of size 16 cannot be dealt out to 2 ranks" in messages["heads"]
    assert "has the style 'local_params', which is not supported" in messages["published style"]
    assert "mlp.act_fn.alpha_p' may be used on sharded or on replicated values" in messages["slopes"]
    for key in ("dropout", "packed dropout"):
        assert "'1' may see sharded or replicated values; set it to 0, or use shard() and fork_rng()" in messages[key]


def test_plans():
    assert tensor_parallel_plan(nn.Linear(2, 2)) == {}
    assert list(gpt2_plan(_gpt2(n_layer=1)).items()) == [
        ("transformer.h.0.attn.c_attn", "colwise"),
        ("transformer.h.0.attn.c_proj", "rowwise"),
        ("transformer.h.0.mlp.c_fc", "colwise"),
        ("transformer.h.0.mlp.c_proj", "rowwise"),
    ]
    assert "lm_head" not in tensor_parallel_plan(_llama_like("llama"))


def _copies_its_config(rank: int) -> None:
    """With a cache, the default, T5's forward makes a deep copy of its config."""
    model = FAMILIES["t5"].model()
    model.config.use_cache = True
    before, batch = copy.deepcopy(model), FAMILIES["t5"].batch()
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=batch)
    sch.tensor_parallel()
    build(sch)
    assert_equivalent(before, model, **batch, loss=lambda outputs: outputs.loss, use_cache=False)
    assert torch.allclose(before(**batch).logits, model(**batch).logits, atol=1e-5)


def test_a_model_that_copies_its_config_while_it_runs() -> None:
    run_distributed(_copies_its_config, 2)
