"""The main job's promise: the scheduled GPT-2 computes what the unmodified one computes, under every layout."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

import slapo
from slapo_testing import run_distributed

LAYERS = 4
Numbers = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]


def gpt2() -> GPT2LMHeadModel:
    """Tied embeddings, dropout 0."""
    torch.manual_seed(1)
    sizes = {"n_layer": LAYERS, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0)
    )


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids}


def unmodified() -> Numbers:
    """Logits, loss, gradients and the weights after one step of AdamW."""
    model = gpt2()
    output = model(**batch())
    output.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    weights = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    return output.logits.detach(), output.loss.detach(), grads, weights


def scheduled(rank: int, tp: int, pp: int, kind: str) -> Any:
    """The same numbers from this rank of a layout, by the names of the unmodified model."""
    mesh = init_device_mesh("cpu", (pp, 1, tp), mesh_dim_names=("pp", "dp", "tp"))

    def schedule() -> slapo.Schedule:
        sch = slapo.create_schedule(gpt2(), mesh=mesh, example_inputs=batch())
        if tp > 1:
            sch.tensor_parallel()
        for stage in range(1, pp):
            sch[f"transformer.h.{stage * LAYERS // pp - 1}"].cut_pipeline_stage()
        return sch

    with torch.no_grad():
        logits = slapo.build_program(schedule())(**batch()).logits
    sch = schedule()
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    engine = slapo.build(sch, target="torch", optimizer=adamw, microbatches=4, pipeline_schedule=kind)
    loss = engine.train_batch(**batch())
    result = logits, loss, copy.deepcopy(sch.full_state("grad")), sch.full_state("param")
    engine.close()
    return result


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("tp", "pp", "kind"),
    [
        pytest.param(1, 1, "1f1b", marks=pytest.mark.slow),
        pytest.param(2, 1, "1f1b", marks=pytest.mark.slow),
        (1, 2, "gpipe"),
        pytest.param(2, 2, "1f1b", marks=pytest.mark.slow),
        pytest.param(1, 4, "1f1b", marks=pytest.mark.slow),
    ],
)
def test_outputs_and_all_gradients_equal_the_unmodified_models(tp: int, pp: int, kind: str) -> None:
    logits, loss, grads, weights = unmodified()
    for found in run_distributed(scheduled, tp * pp, tp, pp, kind, timeout=90):
        torch.testing.assert_close(found[0], logits, atol=1e-5, rtol=0)
        torch.testing.assert_close(found[1], loss, atol=1e-5, rtol=0)
        for expected, actual in ((grads, found[2]), (weights, found[3])):
            assert actual.keys() == expected.keys()
            for name in expected:
                difference = (actual[name] - expected[name]).abs().max().item()
                assert difference <= 1e-5, f"{name}: {difference}"
