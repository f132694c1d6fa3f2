"""Split sequences: ``tensor_parallel(sequence_parallel=True)`` equals the unmodified model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, ScheduleError, build, create_schedule, load_schedule, set_random_seed
from slapo_sharding import plugin
from slapo_testing import DistributedError, run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.zoo.families import FAMILIES, Family

pytestmark = pytest.mark.multiproc

BATCH, LENGTH, WIDTH = 3, 8, 16


class Block(nn.Module):
    """Attention and an MLP, each between a norm and a dropout."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.heads = 4
        self.norm, self.make, self.back = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.norm2, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.make(self.norm(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.back(mixed))
        return x + self.drop(self.mlp(self.norm2(x)))


class Model(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(10, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block(rate), Block(rate)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(10, (BATCH, length), generator=torch.Generator().manual_seed(1))


def _schedule(model: nn.Module, *inputs: Any) -> Schedule:
    return create_schedule(
        model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=inputs
    )


def _steps(rank: int, is_sequential: bool) -> list[str]:
    model = Model()
    if is_sequential:
        model.blocks = nn.Sequential(*model.blocks)  # type: ignore[assignment]
    before = copy.deepcopy(model)
    sch = _schedule(model, token_ids())
    sch.tensor_parallel(sequence_parallel=True)
    (step,) = sch.journal
    build(sch)
    assert_equivalent(before, model, token_ids())
    assert_equivalent(before, model, token_ids(4))
    return [str(child) for child in step.children if ".1." not in str(child)]


@pytest.mark.parametrize(("ranks", "is_sequential"), [(2, False), (2, True), pytest.param(4, False, marks=pytest.mark.slow)])
def test_the_steps_are_those_of_megatron(ranks: int, is_sequential: bool) -> None:
    assert run_distributed(_steps, ranks, is_sequential)[0] == [
        "sch['blocks.0.make'].shard('weight', axis=0, blocks=[16, 16, 16])",
        "sch['blocks.0.back'].shard('weight', axis=1, blocks=1)",
        "sch['blocks.0.back'].sync('fwd_post', 'reduce_scatter', axis=1)",
        "sch['blocks.0.mlp.0'].shard('weight', axis=0, blocks=1)",
        "sch['blocks.0.mlp.2'].shard('weight', axis=1, blocks=1)",
        "sch['blocks.0.mlp.2'].sync('fwd_post', 'reduce_scatter', axis=1)",
        "sch['blocks.0'].sync('fwd_pre', 'scatter', axis=1)",
        "sch['blocks.0.make'].sync('fwd_pre', 'all_gather', axis=1, backward='reduce_scatter')",
        "sch['blocks.0.mlp'].sync('fwd_pre', 'all_gather', axis=1, backward='reduce_scatter')",
        "sch['norm'].sync('fwd_post', 'all_gather', axis=1, backward='split')",
        "sch['blocks.0.norm'].sync('grad', 'all_reduce')",
        "sch['blocks.0.norm2'].sync('grad', 'all_reduce')",
        "sch['norm'].sync('grad', 'all_reduce')",
    ]


class Flat(nn.Module):
    """Layer that flattens its values to tokens, for its MLP alone or for its attention too."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends, self.norm = attends, nn.LayerNorm(WIDTH)
        self.make, self.back, self.act = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, WIDTH)
        made = self.act(self.make(self.norm(tokens)))
        if self.attends:
            heads = made.view(x.shape[0], -1, 4, 4).transpose(1, 2)
            made = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(-1, made.shape[-1])
        return (tokens + self.back(made)).view(x.shape)


def _flat(rank: int, attends: bool) -> None:
    model = Model()
    model.blocks = nn.ModuleList([Flat(attends), Flat(attends)])
    before = copy.deepcopy(model)
    sch = _schedule(model, token_ids()[:1])
    sch.tensor_parallel(sequence_parallel=True)
    build(sch)
    assert_equivalent(before, model, token_ids()[:1])
    assert_equivalent(before, model, token_ids())


def test_flattened_tokens_of_one_example_serve_larger_batches() -> None:
    run_distributed(_flat, 2, False)
    with pytest.raises(DistributedError, match="merged with another dimension"):
        run_distributed(_flat, 2, True)


def _shared(rank: int) -> None:
    model: Any = Model()
    model.blocks[1].norm.weight = model.blocks[0].norm.weight
    model.blocks[1].norm.bias = model.blocks[0].norm.bias
    model.blocks[1].norm2 = model.blocks[0].norm2
    model.norm.requires_grad_(False)
    before = copy.deepcopy(model)
    sch = _schedule(model, token_ids())
    sch.tensor_parallel(sequence_parallel=True)
    build(sch)
    assert_equivalent(before, model, token_ids())
    assert not any(parameter.requires_grad for parameter in model.norm.parameters())


def test_tied_shared_and_frozen_norms_are_correct() -> None:
    run_distributed(_shared, 2)


def _images(rank: int) -> list[str]:
    vit = FAMILIES["vit"]
    model = Family(vit.name, vit.head, vit.inputs, {**vit.config, "image_size": 24}).model()
    batch = {
        "pixel_values": torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(1)),
        "labels": torch.tensor([0, 1]),
    }
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=batch)
    sch.tensor_parallel(sequence_parallel=True)
    (step,) = sch.journal
    build(sch)
    assert_equivalent(before, model, **batch)
    return [str(child) for child in step.children if "gather" in str(child) or "scatter" in str(child)]


def test_an_image_with_divisible_patches_is_split() -> None:
    assert sum("reduce_scatter" in step for step in run_distributed(_images, 2)[0]) == 8


def _saved_bytes(model: nn.Module, *inputs: torch.Tensor) -> int:
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(*inputs)
    kept = sum(storage.nbytes() for storage in saved.values())
    result.square().sum().backward()
    return kept


def _memory(rank: int) -> tuple[int, int]:
    found = []
    for sequence_parallel in (False, True):
        model = Model(rate=0.5)
        sch = _schedule(model, token_ids())
        sch.tensor_parallel(sequence_parallel=sequence_parallel)
        build(sch)
        set_random_seed(3, tp_rank=rank)
        found.append(_saved_bytes(model, token_ids()))
    return found[0], found[1]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_saves_its_shard_of_norms_dropouts_and_inputs(ranks: int) -> None:
    positions = BATCH * LENGTH
    value, statistics = 4 * positions * WIDTH, 2 * 4 * positions
    norms = 5 * (value + statistics)
    masks = 4 * value  # on a CPU, dropout saves its multiplier
    gathered = 4 * value  # inputs of attention and MLP
    for whole, part in run_distributed(_memory, ranks):
        assert whole - part == (norms + masks + gathered) * (ranks - 1) // ranks


def _masks(rank: int) -> tuple[list[float], list[list[bool]]]:
    model = FAMILIES["gpt2"].model(dropout=0.5)
    ids = torch.randint(5, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    sch = create_schedule(
        model,
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]),
        example_inputs={"input_ids": ids, "use_cache": False},
    )
    sch.tensor_parallel(sequence_parallel=True)
    build(sch)
    dropped: list[list[bool]] = []
    block: Any = model.transformer.h[0]
    for module in (model.transformer.drop, block.attn.resid_dropout, block.mlp.dropout):
        module.register_forward_hook(lambda module, args, output: dropped.append((output == 0).flatten().tolist()))
    losses = []
    for _ in range(2):
        set_random_seed(3, tp_rank=rank)
        losses.append(float(model(input_ids=ids, use_cache=False).logits.detach().square().mean()))
    assert dropped[:3] == dropped[3:]
    return losses, dropped[:3]


def test_sequence_shards_have_different_masks_and_runs_repeat() -> None:
    (one, first), (other, second) = run_distributed(_masks, 2)
    assert one[0] == one[1] == other[0] == other[1]
    assert [left == right for left, right in zip(first, second, strict=True)] == [True, False, False]
    assert [len(mask) for mask in first] == [2 * 12 * 32, 2 * 6 * 32, 2 * 6 * 32]


def _called_before_and_behind(rank: int) -> list[float]:
    """Test the stacks of T5, which use one dropout for inputs and for outputs of the layers."""
    model, batch = FAMILIES["t5"].model(dropout=0.5), {**FAMILIES["t5"].batch(), "use_cache": False}
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=batch)
    sch.tensor_parallel(sequence_parallel=True)
    build(sch)
    set_random_seed(3, tp_rank=rank)
    return [float(model(**batch).loss.detach())]


def test_a_dropout_with_whole_inputs_too_has_only_whole_inputs() -> None:
    one, other = run_distributed(_called_before_and_behind, 2)
    assert one == other


def _kept(rank: int) -> None:
    model = Model()
    before, names = copy.deepcopy(model), {name: id(parameter) for name, parameter in model.named_parameters()}
    sch = _schedule(model, token_ids())
    sch.tensor_parallel(sequence_parallel=True)
    sch.save(f"schedule{rank}.json")
    again = load_schedule(
        Model(),
        f"schedule{rank}.json",
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]),
        example_inputs=(token_ids(),),
    )
    build(again)
    assert_equivalent(before, again.mod, token_ids())
    sch.undo()
    assert names == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert_equivalent(before, model, token_ids())


def test_the_plan_is_saved_replayed_and_undone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_distributed(_kept, 2)


def _equal_parts(rank: int) -> None:
    """Compare a model in which each token adds equally to the last norm's bias, so that partial gradients are equal."""
    model = Model()
    before = copy.deepcopy(model)
    sch = _schedule(model, token_ids()).tensor_parallel(sequence_parallel=True)
    build(sch)
    for each in (before, model):
        each(token_ids()).sum().backward()
    expected = {name: parameter.grad for name, parameter in before.named_parameters()}
    torch.testing.assert_close(sch.full_state("grad"), expected, atol=1e-4, rtol=1e-4)


def test_equal_partial_gradients_are_summed():
    run_distributed(_equal_parts, 2)


def _asked_later(rank: int) -> str:
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, vocab_size=32)
    )
    ids = torch.arange(16).view(2, 8)
    sch = create_schedule(
        model,
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]),
        example_inputs={"input_ids": ids, "use_cache": False},
    )
    sch.tensor_parallel(sequence_parallel=True)
    build(sch)
    assert model(ids, use_cache=False).logits.shape == (2, 8, 32)
    with pytest.raises(ScheduleError) as caught:
        model(ids, use_cache=False, output_hidden_states=True)
    return str(caught.value)


def test_hidden_states_are_not_returned_as_shards():
    for message in run_distributed(_asked_later, 2):
        assert message.startswith("tensor_parallel(''): the hidden_states requested from the model are this rank's parts of")


def _without_a_head(rank: int) -> None:
    """Compare a model that returns a structure with the output of the last norm in it."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
    for model in (LlamaModel(LlamaConfig(**sizes, use_cache=False)), BertModel(BertConfig(**sizes))):
        ids, before = torch.arange(16).view(2, 8), copy.deepcopy(model.eval())
        sch = create_schedule(
            model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs={"input_ids": ids}
        )
        sch.tensor_parallel(sequence_parallel=True)
        build(sch)
        assert_equivalent(before, model, input_ids=ids, loss=lambda outputs: outputs.last_hidden_state.sin().sum())


def test_a_model_without_a_head_returns_the_whole_sequence() -> None:
    run_distributed(_without_a_head, 2)
