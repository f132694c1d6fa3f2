"""Key caches, which Transformers' models keep by default: in training, and token by token."""

from __future__ import annotations

import copy

import pytest
import torch

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from tests.zoo.families import FAMILIES

pytestmark = pytest.mark.multiproc


def keeps(rank: int, name: str) -> float:
    """Compare losses, gradients and the logits of the next token; return the share of parameters that this rank holds."""
    torch.manual_seed(0)
    model, batch = FAMILIES[name].model(), FAMILIES[name].batch()
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs=batch)
    sch.tensor_parallel()
    build(sch)
    results = [each(**batch) for each in (before, model)]
    assert all(result.past_key_values is not None for result in results)
    for result in results:
        result.loss.backward()
    torch.testing.assert_close(results[1].loss, results[0].loss)
    gradients = sch.full_state("grad")
    for path, parameter in before.named_parameters():
        torch.testing.assert_close(gradients[path], parameter.grad, atol=1e-5, rtol=1e-3)
    ids, logits = batch["input_ids"], []
    with torch.no_grad():
        for each in (before.eval(), model.eval()):
            cache = each(input_ids=ids[:, :4]).past_key_values
            logits.append(each(input_ids=ids[:, 4:5], past_key_values=cache).logits)
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-4)
    whole, own = (sum(parameter.numel() for parameter in each.parameters()) for each in (before, model))
    return own / whole


@pytest.mark.parametrize("name", ["deepseek_v3", "olmo2", "falcon"])
def test_a_cache_is_filled_and_read(name: str) -> None:
    assert max(run_distributed(keeps, 2, name, timeout=120)) < 0.65
