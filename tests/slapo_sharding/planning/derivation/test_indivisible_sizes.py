"""Derived plans with sizes that are not divisible: these layers stay whole, with a warning, and numerics are equal."""

from __future__ import annotations

import copy

import pytest
import torch

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, ScheduleError, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.slapo_sharding.logged_warnings import warnings_told
from tests.slapo_sharding.planning.sequence.test_sequence_parallel import Model, token_ids
from tests.slapo_sharding.split_families import family

pytestmark = pytest.mark.multiproc


def _whole(rank: int, name: str, sizes: dict[str, int]) -> tuple[list[str], list[str]]:
    """Return the steps and the warnings; one warning stands for all layers with the same reason."""
    model, batch = family(name, **sizes)
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=batch)
    with warnings_told() as warnings:
        sch.tensor_parallel(sequence_parallel=True)
    (step,) = sch.journal
    build(sch)
    assert_equivalent(before, model, **batch)
    return [str(child).partition("]")[0] for child in step.children if "'weight'" in str(child)], warnings


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "sizes", "whole", "split", "reason"),
    [
        pytest.param(
            "gpt2",
            {"n_inner": 25},
            "transformer.h.0.mlp.c_fc",
            "attn.c_attn",
            "size 25 is not divisible by 2 ranks",
            marks=pytest.mark.slow,
        ),
        ("llama", {"intermediate_size": 25}, "model.layers.0.mlp.gate_proj", "k_proj", "size 25 is not divisible by 2 ranks"),
        (
            "bert",
            {"num_attention_heads": 3, "hidden_size": 24},
            "bert.encoder.layer.0.attention.self.query",
            "output.dense",
            "3 heads, or whatever has size 8 here, are not divisible by 2 ranks",
        ),
    ],
)
def test_indivisible_layers_stay_whole_with_a_warning(name, sizes, whole, split, reason):
    for steps, warnings in run_distributed(_whole, 2, name, sizes):
        assert not any(whole in step for step in steps)
        assert any(split in step for step in steps)
        assert f"tensor_parallel: {whole} stays whole on every rank: {reason}" in warnings[0]
        assert ".py:" in warnings[0]
        assert not any(".1." in message for message in warnings)


class Twice(Model):
    """Model whose head has one input split along the sequence and one whole input."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = start = self.embed(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x * 2.0) + self.head(start)


def _refusal(rank: int, kind: str) -> str:
    model, batch = (Twice(), (token_ids(),)) if kind == "twice" else family("t5", num_heads=3)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=batch)
    with pytest.raises(ScheduleError) as caught:
        sch.tensor_parallel(sequence_parallel=True)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        (
            "twice",
            (
                "the layer 'head' has an input of shape [3, 8, 16] that is split along dimension 1",
                "test_indivisible_sizes.py:",
            ),
        ),
        pytest.param(
            "heads",
            (
                "the layer 'encoder.block.0.layer.0.SelfAttention.q' has an input",
                "the layer is not split for this reason: 3 heads, or whatever has size 8 here, are not divisible by 2 ranks",
                "modeling_t5.py:",
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_layer_with_an_input_split_along_the_sequence_is_named(kind, messages):
    first, second = run_distributed(_refusal, 2, kind)
    assert first == second
    assert all(message in first for message in messages)
