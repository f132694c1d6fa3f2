"""The classic script for BERT: traced, rewritten, fused, sharded, checkpointed, verified, and trained by DeepSpeed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

import slapo
from slapo_memory.forward_wrappers.recomputation import is_checkpointed
from slapo_verify import run_as_threads
from tests.slapo.classic_script import Classic

BERT = Classic("bert_classic")


def scheduled(layers: int) -> tuple[nn.Module, slapo.Schedule, dict[str, Any]]:
    """The unmodified model, the schedule of a copy, and the batch."""
    train = BERT.functions()
    train["make_model"].__globals__["LAYERS"] = layers
    model, batch = train["make_model"](), train["make_batch"]()
    return copy.deepcopy(model), train["schedule"](model, batch), batch


def verified(layers: int = 1) -> list[str]:
    """Numbers and gradients are the unmodified model's; returns the notes."""
    reference, sch, batch = scheduled(layers)
    report = slapo.verify(reference, sch, batch).check()
    return list(report.notes)


def test_the_schedule_computes_as_the_unmodified_model() -> None:
    assert any("it has no 'bert.encoder.layer.0.attention.self.query.weight' and 5 more" in note for note in verified())


@pytest.mark.slow
def test_the_schedule_computes_so_on_two_ranks() -> None:
    first, second = run_as_threads(lambda: verified(2), 2)
    assert first == second


def test_what_the_schedule_made_of_the_model() -> None:
    reference, sch, _ = scheduled(2)
    layer = sch["bert.encoder.layer.1"]
    assert "query" not in layer["attention.self"]
    called = [str(node.target) for _, node in layer["attention.self"].find_node(lambda node: node.op == "call_module")]
    assert called == ["qkv", "efficientattention"]
    assert [node.target for _, node in layer["output"].find_node(r"dropout_add")] == ["dropout_add"]
    assert [is_checkpointed(sch[f"bert.encoder.layer.{number}"].mod) for number in (0, 1)] == [True, False]
    while sch.journal.steps:
        sch.undo()
    assert [type(module) for module in sch.mod.modules()] == [type(module) for module in reference.modules()]


def test_the_page_shows_the_script_as_it_is() -> None:
    assert [snippet for snippet in BERT.snippets() if snippet not in BERT.code] == []


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.multiproc
@pytest.mark.parametrize("command", BERT.commands)
def test_a_command_of_the_page(command: str) -> None:
    BERT.run(command)
