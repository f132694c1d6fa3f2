"""``loss_weights`` and ``loss_over``: each step is that of the whole batch in one process, however uneven its parts are."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_testing import run_distributed
from tests.loss_cases import (
    CASES,
    OVER,
    REFUSED,
    Towers,
    all_differences,
    contrast,
    engine_of,
    of_towers,
    refusals,
    sgd,
    shares,
)

from ..layouts import mesh_of, message_of

pytestmark = pytest.mark.multiproc
SHARDED = {"microbatches": 2, "data_parallel": "fsdp", "fsdp_units": []}
BY_UNIT = {"microbatches": 2, "data_parallel": "fsdp", "fsdp_units": ["first"]}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "options", "kind"),
    [
        ({}, {"microbatches": 2}, ""),
        ({}, {"microbatches": 8}, "over"),
        ({"dp": 2}, {"microbatches": 2}, ""),
        pytest.param({"dp": 2}, {"microbatches": 1}, "", marks=pytest.mark.slow),
        ({"dp": 2}, SHARDED, ""),
        pytest.param({"dp": 2}, BY_UNIT, "", marks=pytest.mark.slow),
        ({"pp": 2}, {"microbatches": 2}, ""),
        pytest.param({"pp": 2, "dp": 2}, {"microbatches": 2}, "", marks=pytest.mark.slow),
        pytest.param({"tp": 2}, {"microbatches": 2}, "over split", marks=pytest.mark.slow),
        pytest.param({"pp": 2}, {"microbatches": 1, "pipeline_schedule": "gpipe"}, "over", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_step_is_that_of_the_whole_batch(layout: dict[str, int], options: dict[str, Any], kind: str) -> None:
    ranks = math.prod(layout.values())
    names = [name for name in CASES if name.startswith(kind)]
    for found in run_distributed(all_differences, ranks, "torch", layout, options, names, timeout=110):
        for name, difference in found.items():
            assert not isinstance(difference, str), (name, difference)
            assert difference < (5e-5 if name == "over sum" else 5e-6), name


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    for found in run_distributed(refusals, 2, "torch", {"dp": 2}):
        for name, (_, text) in REFUSED.items():
            assert text in found[name], (name, found[name])


def _of_parts(model: Towers, batch: dict[str, torch.Tensor], parts: int) -> torch.Tensor:
    """The loss of outputs that a process computes part by part, drawing as it goes."""
    outputs = [model(**{name: value.chunk(parts)[index] for name, value in batch.items()}) for index in range(parts)]
    together = {name: torch.cat([output[name] for output in outputs]) for name in ("image", "text")}
    return contrast({**together, "scale": outputs[0]["scale"]}, None)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_both_runs_draw_alike_and_buffers_change_once(parts: int) -> None:
    make = partial(Towers, dropout=0.5, norm=True)
    torch.manual_seed(0)
    model, reference = make(), make()
    reference.load_state_dict(model.state_dict())
    schedule = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin]))
    engine: Any = build(schedule, "torch", optimizer=sgd, loss_fn=contrast, loss_over="replicas", microbatches=parts)
    optimizer = sgd(reference.parameters())
    for step in range(3):
        torch.manual_seed(step)
        loss = engine.train_batch(**of_towers(step))
        drawn = torch.rand(())
        torch.manual_seed(step)
        optimizer.zero_grad()
        expected = _of_parts(reference, of_towers(step), parts)
        assert torch.rand(()) == drawn
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(model.state_dict(), reference.state_dict())


def _broken_off(rank: int, parts: int) -> tuple[str, float]:
    """Return the message of a step in which one replica fails, and the difference of the next step from one process."""
    mesh, case = mesh_of(dp=2), OVER["clip"]
    torch.manual_seed(0)
    reference = case.model()
    engine, _ = engine_of(case, mesh, "torch", microbatches=parts, check=False)  # the step itself is to fail
    wrong = shares(of_towers(0), mesh)
    if rank == 1:
        engine.module.text.register_forward_pre_hook(_fail_once())
    said = message_of(lambda: engine.train_batch(**wrong))
    loss = engine.train_batch(**shares(of_towers(0), mesh)).item()
    return said, abs(loss - contrast(reference(**of_towers(0)), None).item())


def _fail_once() -> Any:
    left = [None]

    def fail(*_: Any) -> None:
        if left:
            left.pop()
            raise ValueError("out of luck")

    return fail


@pytest.mark.parametrize("parts", [1, 2])
def test_an_error_of_one_replica_is_raised_on_all(parts: int) -> None:
    (waited, first), (failed, second) = run_distributed(_broken_off, 2, parts)
    assert "out of luck" in failed
    assert "rank 1 failed: ValueError: out of luck" in waited
    for difference in (first, second):
        assert difference < 1e-6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("parts", [1, 2])
def test_in_low_precision(precision: str, parts: int) -> None:
    torch.manual_seed(0)
    model, reference = Towers(), Towers()
    reference.load_state_dict(model.state_dict())
    schedule = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin]))
    options: dict[str, Any] = {"loss_fn": contrast, "loss_over": "replicas", "precision": precision}
    engine: Any = build(schedule, "torch", optimizer=sgd, microbatches=parts, **options)
    for step in range(3):
        loss = engine.train_batch(**of_towers(step))
        expected = contrast(reference(**of_towers(step)), None)
        reference.zero_grad()
        expected.backward()
        assert abs(loss.item() - expected.item()) < 3e-2
        for name, each in reference.named_parameters():
            torch.testing.assert_close(engine.module.get_parameter(name).grad, each.grad, atol=3e-2, rtol=0)
        reference.load_state_dict(model.state_dict())
