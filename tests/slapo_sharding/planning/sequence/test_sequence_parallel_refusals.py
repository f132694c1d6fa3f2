"""Refusals of ``tensor_parallel(sequence_parallel=True)``, after which the model is unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, ScheduleError, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from tests.slapo_sharding.handwritten import SPLIT, D, Net
from tests.slapo_sharding.planning.local_sizes.test_handwritten import tokens
from tests.slapo_sharding.planning.sequence.test_sequence_parallel import Model, token_ids
from tests.slapo_sharding.split_families import ALONG_REFUSED, LEFT_WHOLE, LEFT_WHOLE_ALONG, NONE

pytestmark = pytest.mark.multiproc


class Odd(Model):
    """Model with one operation that a shard of the sequence cannot do."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why, self.calls = why, torch.zeros(())
        if why == "used on both":
            self.blocks[1].norm = self.blocks[0].norm
        if why == "a list":
            self.blocks = nn.Sequential(*self.blocks, nn.Identity())  # type: ignore[assignment]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.places[: ids.shape[1]]
        if self.why == "another order":
            x = x.transpose(0, 1)
        if self.why == "used on both":
            x = self.blocks[0].norm(x)
        if self.why == "keeps":
            self.calls = self.calls + 1
            x = x + self.calls
        for block in self.blocks:
            x = block(x)
            if self.why == "the length":
                x = x + torch.arange(x.shape[1])[:, None] / 10
            if self.why == "neighbours":
                x = x + x.roll(1, 1)
        return self.head(self.norm(x))


def _refusals(rank: int) -> dict[str, str]:
    messages = {}

    def refused(key: str, model: nn.Module, inputs: Any, **options: Any) -> None:
        state = [(name, id(p), len(p._backward_hooks or ())) for name, p in model.named_parameters()]
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        sch = create_schedule(
            model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=inputs
        )
        with pytest.raises(ScheduleError) as caught:
            sch.tensor_parallel(sequence_parallel=True, **options)
        messages[key] = str(caught.value)
        assert state == [(name, id(p), len(p._backward_hooks or ())) for name, p in model.named_parameters()]
        assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        assert not sch.journal

    refused("no inputs", Model(), None)
    refused("a plan", Model(), (token_ids(),), plan={"head": "colwise"})
    refused("odd length", Model(), (token_ids(7),))
    for why in ("another order", "used on both", "a list", "the length", "neighbours", "keeps"):
        refused(why, Odd(why), (token_ids(),))
    return messages


def test_a_refused_split_changes_nothing() -> None:
    first, second = run_distributed(_refusals, 2, timeout=100)
    assert first == second
    assert "give example_inputs to create_schedule" in first["no inputs"]
    assert "leave out plan, or sequence_parallel" in first["a plan"]
    assert (
        "assigns to its attribute 'calls' or changes it, which a graph cannot repeat; leave the assignment out"
        in first["keeps"]
    )
    assert "the sequence cannot be split" in first["keeps"]
    assert "leaf_modules" not in first["keeps"]
    assert "the sequence in 'blocks.0' has length 7, not divisible by 2 ranks" in first["odd length"]
    assert "'blocks.0' has inputs of shape [8, 3, 16], not [batch, sequence, width]" in first["another order"]
    assert "'blocks.0.norm.weight' is used on a shard of the sequence and on all of it" in first["used on both"]
    assert "no list of layers (nn.ModuleList, or nn.Sequential of one class)" in first["a list"]
    for why in ("the length", "neighbours"):
        assert "test_sequence_parallel" in first[why], "the line of the model"


def _other_lengths(rank: int) -> list[str]:
    """Run lengths that the example did not have; the first call is checked, the others are not."""
    messages = []
    model = Model()
    sch = create_schedule(
        model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=(token_ids(),)
    )
    sch.tensor_parallel(sequence_parallel=True)
    build(sch)
    for length in (7, 8, 7):
        if length == 8:
            model(token_ids())
            continue
        with pytest.raises(ScheduleError) as caught:
            model(token_ids(length))
        messages.append(str(caught.value))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 32}
    llama = LlamaForCausalLM(LlamaConfig(**sizes))
    inputs = {"input_ids": token_ids(), "use_cache": False}
    sch = create_schedule(llama, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=inputs)
    sch.tensor_parallel(sequence_parallel=True)
    build(sch)
    with pytest.raises(ScheduleError) as caught:
        llama.generate(token_ids(), max_new_tokens=2, do_sample=False)
    return [*messages, str(caught.value)]


def test_an_indivisible_length_names_the_module_and_the_remedy() -> None:
    remedy = "cannot be split over 2 ranks; pad it to a multiple, or, to generate, leave out sequence_parallel"
    odd = f"sync('blocks.0'): fwd_pre scatter: the sequence of 7 in [3, 7, 16] {remedy}"
    token = f"sync('model.layers.0'): fwd_pre scatter: the sequence of 1 in [3, 1, 16] {remedy}"
    assert run_distributed(_other_lengths, 2) == [[odd, odd, token]] * 2


class Routed(nn.Module):
    """Attention, and experts with data-dependent numbers of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.gate = SPLIT["SplitByWidth"](), nn.Linear(D, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 4 * D), nn.ReLU(), nn.Linear(4 * D, D)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows_of = (x + self.attention(x)).view(-1, D)
        chosen, out = self.gate(rows_of).argmax(-1), torch.zeros_like(rows_of)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out[rows] += expert(rows_of[rows])
        return out.view_as(x)


def _routed(rank: int) -> str:
    sch = create_schedule(Net(Routed), example_inputs=(tokens(2, 8),))
    with pytest.raises(ScheduleError) as caught:
        sch.tensor_parallel(sequence_parallel=True)
    return str(caught.value)


def test_data_dependent_shapes_are_refused() -> None:
    first, second = run_distributed(_routed, 2)
    assert first == second
    assert "the sequence cannot be split: the result shape of where depends on data (" in first


def test_the_readme_lists_refused_and_partly_split_families() -> None:
    page = (Path(__file__).parents[4] / "plugins/slapo_sharding/README.md").read_text(encoding="utf-8")
    part = page.partition("## Families that are refused, or split in part\n")[2].partition("\n## ")[0]
    rows = {tuple(cell.strip() for cell in line.strip("|").split("|")) for line in part.splitlines() if line.startswith("|")}
    listed = {(name, "yes", "refused", why) for name, (why, _) in ALONG_REFUSED.items()}
    listed |= {(name, left.what, left.why) for name, left in LEFT_WHOLE.items() if left.what and left.why != NONE}
    listed |= {(name, f"{left.what}, with sequence parallelism", left.why) for name, left in LEFT_WHOLE_ALONG.items()}
    titles = {("family", "tensor parallelism", "sequence parallelism", "why"), ("family", "stays whole", "why")}
    assert {row for row in rows if row[0] != "---"} == listed | titles
