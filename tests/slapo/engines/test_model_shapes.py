"""Models of other shapes than a stack of layers train on each engine as in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import slapo
from slapo_core import is_sharded
from slapo_testing import run_distributed
from tests.slapo.model_shapes import SHAPES, batches, loss_of, made
from tests.slapo_torch.layouts import mesh_of

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]
SGD = partial(torch.optim.SGD, lr=0.1)
FSDP: dict[str, Any] = {"data_parallel": "fsdp"}
ZERO_3: dict[str, Any] = {"config": {"zero_optimization": {"stage": 3}}}
OTHER_TYPES = {"fourier", "float64"}
"""Models of types that only torch's engine trains."""
CUTS = {
    "universal": "words",
    "recurrent": "lstm",
    "fourier": "words",
    "float64": "block",
    "caches": "blocks.0",
    "deep": "layers.40",
}
"""End of the first of two stages."""


def beside_one_process(rank: int, name: str, target: str, layout: dict[str, int], options: dict[str, Any]) -> dict[str, float]:
    """Return how far losses and weights are from one process's, and how many parameters are split."""
    mesh, plain, model, loss_fn = mesh_of(**layout), made(name), made(name), loss_of(name)
    replicas = mesh["dp"].size()
    data = batches()
    example = data[0] if loss_fn is None else data[0][:1]
    sch = slapo.create_schedule(model, mesh=mesh, example_inputs=tuple(each[:2] for each in example))
    if mesh["tp"].size() > 1:
        sch.tensor_parallel()
    if mesh["pp"].size() > 1:
        sch[CUTS[name]].cut_pipeline_stage()
    num_split = sum(map(is_sharded, model.parameters()))
    given = {} if loss_fn is None else {"loss_fn": loss_fn}
    engine: Any = slapo.build(sch, target, optimizer=SGD, microbatches=2, **given, **options)
    optimizer, worst = SGD([each for each in plain.parameters() if each.requires_grad]), 0.0
    for words, targets in data:
        labels = words if name == "teacher outside" else targets
        expected = plain(words, targets) if loss_fn is None else loss_fn(plain(words), labels)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        own = [each.chunk(replicas)[mesh["dp"].get_local_rank()] for each in (words, targets, labels)]
        loss = engine.train_batch(*own[:2]) if loss_fn is None else engine.train_batch(own[0], labels=own[2])
        worst = max(worst, abs(loss.item() - expected.item()))
    found = engine.full_state() if hasattr(engine, "full_state") else sch.full_state("param")
    apart = max(float((found[key] - value.detach()).abs().max()) for key, value in plain.named_parameters())
    engine.close()
    return {"loss": worst, "weights": apart, "split": num_split}


CASES: list[Any] = [
    ("torch", {"tp": 2}, {}, ("recurrent", "float64", "teacher outside", "deep")),
    ("torch", {"dp": 2}, FSDP, ("recurrent", "fourier", "float64", "teacher inside")),
    ("torch", {"pp": 2}, {}, ("fourier", "caches")),
    pytest.param("torch", {"tp": 2}, {}, tuple(SHAPES), marks=pytest.mark.slow),
    pytest.param("torch", {"dp": 2}, FSDP, tuple(SHAPES), marks=pytest.mark.slow),
    pytest.param("torch", {"pp": 2}, {}, tuple(CUTS), marks=pytest.mark.slow),
    pytest.param("torch", {"dp": 2}, {}, tuple(SHAPES), marks=pytest.mark.slow),
    pytest.param("deepspeed", {"tp": 2}, {}, tuple(SHAPES), marks=pytest.mark.slow),
    pytest.param("deepspeed", {"dp": 2}, ZERO_3, tuple(SHAPES), marks=pytest.mark.slow),
    pytest.param("megatron", {"tp": 2}, {}, tuple(SHAPES), marks=pytest.mark.slow),
    pytest.param("megatron", {"dp": 2}, {}, tuple(SHAPES), marks=pytest.mark.slow),
]


def _all(rank: int, names: tuple[str, ...], *given: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = beside_one_process(rank, name, *given)
        except slapo.SlapoError as err:
            found[name] = f"{type(err).__name__}: {err}"
    return found


@pytest.mark.parametrize(("target", "layout", "options", "names"), CASES)
def test_steps_are_those_of_one_process(
    target: str, layout: dict[str, int], options: dict[str, Any], names: tuple[str, ...]
) -> None:
    for found in run_distributed(_all, 2, names, target, layout, options, timeout=250):
        refused = {name: found.pop(name) for name in OTHER_TYPES & found.keys() if target != "torch"}
        assert all("parameters of another type" in each for each in refused.values()), refused
        assert all(isinstance(each, dict) and max(each["loss"], each["weights"]) < 2e-5 for each in found.values()), found
        assert all(each["split"] for each in found.values() if layout.get("tp")), found
