"""The classic script for T5: traced to its blocks, cut four times, its ties analysed, trained by torch and by Megatron."""

from __future__ import annotations

import copy

import pytest
import torch

import slapo
from tests.slapo.classic_script import Classic

T5 = Classic("t5_pipeline")


def test_the_stages_compute_as_the_unmodified_model() -> None:
    train = T5.functions()
    model, batch = train["make_model"](), train["make_batch"]()
    reference, sch = copy.deepcopy(model), train["schedule"](model, batch)
    staged = slapo.pipeline.generate_pipeline_partition(sch)
    assert list(staged.child) == [f"submod_{stage}" for stage in range(5)]
    for module in (reference, staged.mod):
        module(**batch).loss.backward()
    weights = sch.mod.named_parameters()
    for (name, ours), (_, theirs) in zip(weights, reference.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    assert slapo.verify(reference, sch, batch, eval_mode=False).check().compared["gradients"] == 84
    lines = train["analysis"](staged)
    assert [line for line in T5.shown if not line.startswith("cuts ") and line not in lines] == []


def test_the_page_shows_the_script_as_it_is() -> None:
    assert [snippet for snippet in T5.snippets() if snippet not in T5.code] == []


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.multiproc
@pytest.mark.parametrize("command", T5.commands)
def test_a_command_of_the_page(command: str) -> None:
    T5.run(command)
