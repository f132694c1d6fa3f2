"""``use_kernels("linear_cross_entropy")`` where the head's weight is there for its forward alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from slapo_core import SlapoError, build, create_schedule
from slapo_kernels.lazy.logits import LazyLogits
from slapo_testing import run_distributed
from tests.slapo_torch.layouts import adamw
from tests.zoo.families import FAMILIES, VOCAB

pytestmark = pytest.mark.multiproc


def _loss(model: nn.Module, batch: dict[str, torch.Tensor], inside: bool) -> tuple[torch.Tensor, bool]:
    """The loss of this rank, and whether nobody has looked at the logits."""
    labels = batch["labels"]
    outputs = model(**batch) if inside else model(**{**batch, "labels": None})
    logits = outputs.logits
    loss = outputs.loss if inside else F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
    return loss, _is_lazy(logits)


def _is_lazy(logits: torch.Tensor) -> bool:
    return isinstance(logits, LazyLogits) and logits.materialized is None and not logits.observers


def by_hand(rank: int, name: str, own_unit: bool, frees: bool, inside: bool) -> tuple[float, str]:
    """Largest difference of losses and gradients from those without the kernel over two steps, and how the loss came."""
    torch.manual_seed(0)
    mesh, runs, how = init_device_mesh("cpu", (2,)), [], ""
    for served in (False, True):
        model = FAMILIES[name].model()
        if served:
            create_schedule(model).use_kernels("linear_cross_entropy")
        head = model.get_output_embeddings()  # type: ignore[operator]
        for unit in [*(model.model.layers if name == "llama" else model.transformer.h), *([head] if own_unit else [])]:  # type: ignore[union-attr]
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=frees)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), []
        for step in range(2):
            batch = FAMILIES[name].batch(seed=10 * rank + step)
            try:
                loss, is_lazy = _loss(model, batch, inside)
            except SlapoError as error:
                return 0.0, str(error)
            how = ("by the kernel" if is_lazy else "by logits") if served else how
            optimizer.zero_grad()
            loss.backward()
            found += [
                loss.detach(),
                *(each.grad.full_tensor() for each in model.parameters() if isinstance(each.grad, DTensor)),
            ]
            optimizer.step()
        runs.append(found)
    assert len(runs[0]) == len(runs[1]) > 10
    return max((one - other).abs().max().item() for one, other in zip(*runs, strict=True)), how


LOST = "freed the head's weight since the head ran"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "own_unit", "frees", "inside", "how"),
    [
        ("llama", False, False, True, "by the kernel"),
        ("gpt2", False, False, True, "by the kernel"),
        ("llama", True, False, True, "by logits"),
        ("llama", False, True, True, "by the kernel"),
        ("llama", False, False, False, "by logits"),
        ("llama", False, True, False, LOST),
        ("llama", True, True, False, "by logits"),
    ],
)
def test_fully_shard(name: str, own_unit: bool, frees: bool, inside: bool, how: str) -> None:
    for difference, found in run_distributed(by_hand, 2, name, own_unit, frees, inside, timeout=100):
        assert how in found
        assert difference < 1e-5


def by_an_engine(rank: int, target: str, config: dict[str, Any]) -> tuple[float, set[bool]]:
    """Largest difference of losses from those without the kernel over three steps, and how lazy logits were."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    runs, lazy = [], set[bool]()
    for served in (False, True):
        model, batch = FAMILIES["llama"].model(), {**FAMILIES["llama"].batch(seed=rank), "use_cache": False}
        batch["labels"][rank, : 3 + rank] = -100  # micro-batches and ranks with other numbers of labels
        schedule = create_schedule(model, mesh=mesh, example_inputs=batch)
        if served:
            schedule.use_kernels("linear_cross_entropy")
            model.register_forward_hook(lambda _, args, out: lazy.add(_is_lazy(out.logits)))
        engine = build(schedule, target, optimizer=adamw, **config)
        runs.append([engine.train_batch(**batch).detach().clone() for _ in range(3)])
        engine.close()
    assert runs[0][0] > runs[0][-1]
    return max((one - other).abs().item() for one, other in zip(*runs, strict=True)), lazy


def _zero(stage: int) -> dict[str, Any]:
    return {"config": {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 1}}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("target", "config", "is_lazy"),
    [
        ("torch", {"data_parallel": "ddp"}, True),
        ("torch", {"data_parallel": "ddp", "microbatches": 2}, True),
        ("torch", {"data_parallel": "fsdp"}, True),
        ("torch", {"data_parallel": "fsdp", "fsdp_units": ["lm_head", "model.layers.*"]}, False),
        ("deepspeed", _zero(1), True),
        ("deepspeed", _zero(3), False),
    ],
    ids=["ddp", "micro-batches", "fsdp", "fsdp of the head", "zero 1", "zero 3"],
)
def test_an_engine(target: str, config: dict[str, Any], is_lazy: bool) -> None:
    for difference, found in run_distributed(by_an_engine, 2, target, config, timeout=100):
        assert difference < 1e-5
        assert (True in found) is is_lazy
