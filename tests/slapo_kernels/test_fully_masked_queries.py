"""``use_kernels`` where masks leave nothing to look at: such queries get what they got in the unmodified model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import Schedule, create_schedule
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.zoo.families import FAMILIES

WAYS = {
    "zeros": ("sdpa", {"*": "eager"}, "slapo_eager"),
    "means": ("eager", {"*": "eager", "attention": "native"}, "slapo_sdpa"),
}
"""Result of such queries, attention of the model, forced implementation, and the expected name of the attention."""


def made(name: str, attention: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model, and a batch of which one text is padded on the left."""
    import transformers

    family = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, family.head).from_config(family.make_config(), attn_implementation=attention)
    ids = family.batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return model, {"input_ids": ids, "attention_mask": mask, **({} if name == "modernbert" else {"use_cache": False})}


def attends(model: nn.Module) -> str:
    return str(model.config._attn_implementation)  # type: ignore[union-attr]


EACH = ["gpt2", "modernbert", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "gemma3_text", "mistral", "qwen3"))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("way", WAYS)
def test_queries_that_see_nothing(way: str, name: str) -> None:
    attention, force, expected = WAYS[way]
    model, batch = made(name, attention)
    before = copy.deepcopy(model)
    schedule = create_schedule(model, example_inputs=batch)
    schedule.use_kernels(force=force)
    assert attends(model) == expected
    assert_equivalent(before, model, **batch, atol=5e-5, rtol=1e-4)
    schedule.undo()
    assert attends(model) == attention


def test_what_they_get_without_a_name_of_our_own() -> None:
    """Transformers' own implementations differ there, and there alone."""
    model, batch = made("gpt2", "sdpa")
    eager: Any = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    seen = batch["attention_mask"].bool()
    one, other = model(**batch).logits, eager(**batch).logits
    torch.testing.assert_close(one[seen], other[seen])
    assert (one[~seen] - other[~seen]).abs().max() > 1e-2


@pytest.mark.parametrize("way", WAYS)
def test_told_again(way: str) -> None:
    attention, force, expected = WAYS[way]
    model, batch = made("gpt2", attention)
    before, schedule = copy.deepcopy(model), create_schedule(model, example_inputs=batch)
    for choice, name in ((force, expected), ({"attention": {"sdpa": "native"}.get(attention, attention)}, attention)):
        schedule.use_kernels("attention", force={"attention": choice.get("attention", "eager")})
        assert attends(model) == name
        assert_equivalent(before, model, **batch)
    schedule.undo()
    assert attends(model) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_autocast(way: str, dtype: torch.dtype) -> None:
    attention, force, _ = WAYS[way]
    model, batch = made("gpt2", attention)
    before = copy.deepcopy(model)
    create_schedule(model, example_inputs=batch).use_kernels("attention", force={"attention": force.get("attention", "eager")})
    with torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(model(**batch).logits, before(**batch).logits, atol=2e-2, rtol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_compiled(way: str) -> None:
    attention, force, _ = WAYS[way]
    model, batch = made("gpt2", attention)
    before = copy.deepcopy(model)
    create_schedule(model, example_inputs=batch).use_kernels(force=force)
    assert_equivalent(before, torch.compile(model, backend="eager", fullgraph=True), **batch)


@pytest.mark.parametrize("way", WAYS)
def test_traced(way: str) -> None:
    attention, force, _ = WAYS[way]
    model, batch = made("gpt2", attention)
    before, schedule = copy.deepcopy(model), create_schedule(model, example_inputs=batch)
    schedule.use_kernels(force=force)
    schedule.trace(flatten=True)
    assert_equivalent(before, schedule.mod, **batch)


def test_eager_attention_that_was_traced_first() -> None:
    model, batch = made("gpt2", "eager")
    before, schedule = copy.deepcopy(model), create_schedule(model, example_inputs=batch)
    schedule.trace(flatten=True)
    schedule.use_kernels("attention", force={"attention": "native"})
    assert_equivalent(before, schedule.mod, **batch, atol=5e-5, rtol=1e-4)


def test_models_that_go_by_the_name_keep_it() -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    class Attention(LlamaAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            assert self.config._attn_implementation in ("eager", "sdpa")
            return super().forward(*args, **kwargs)

    model, batch = made("llama", "sdpa")
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.__class__ = Attention
    create_schedule(model, example_inputs=batch).use_kernels(force={"*": "eager"})
    assert attends(model) == "eager"
    model(**batch)


def split(rank: int, name: str, kernels_first: bool) -> list[str]:
    """How each of the two ways attends over two ranks, where it computes what the unmodified model does."""
    found = []
    for attention, force, _ in WAYS.values():
        model, batch = made(name, attention)
        before = copy.deepcopy(model)
        schedule = create_schedule(model, example_inputs=batch)
        for kernels in (kernels_first, not kernels_first):
            _step(schedule, kernels, force)
        assert_equivalent(before, model, **batch, atol=1e-4, rtol=1e-3)
        found.append(attends(model))
    return found


def _step(schedule: Schedule, kernels: bool, force: dict[str, str]) -> None:
    if kernels:
        schedule.use_kernels(force=force)
    else:
        schedule.tensor_parallel()


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("kernels_first", [True, False])
@pytest.mark.parametrize("name", ["modernbert", "mistral"])
def test_on_two_ranks(name: str, kernels_first: bool) -> None:
    names = [expected for _, _, expected in WAYS.values()]
    assert run_distributed(split, 2, name, kernels_first, timeout=100) == [names] * 2
