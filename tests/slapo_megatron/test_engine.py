"""Behaviour of an engine on Megatron beside training like one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slapo.framework_dialect import get_dialect_cls
from slapo_core import build
from slapo_testing import run_distributed
from tests.engine_models import batches, my_part, small
from tests.engines import NO_OPTIMIZER, PLUGINS, alone, own_losses, scheduled, trained, without_optimizer
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

pytestmark = pytest.mark.multiproc


def megatrons_optimizer(rank: int) -> tuple[list[float], str]:
    """Return how far losses with Megatron's optimizer are from those of one process, and those of an engine without one."""
    mesh, data = mesh_of(dp=2), batches(2)
    section = {"optimizer": "adam", "lr": 1e-2, "adam_eps": 1e-3, "weight_decay": 0.0}
    schedule = scheduled(small("gpt2"), mesh, my_part(data[0], mesh))
    engine = build(schedule, "megatron", config={"optimizer": section}, microbatches=2)
    found = trained(engine, [my_part(batch, mesh) for batch in data])
    reference = small("gpt2")
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    expected = alone(optimizer, own_losses(reference, data))
    difference, message = without_optimizer("megatron", mesh)
    return [difference, *(abs(a - b) for a, b in zip(found, expected, strict=True))], message


def test_megatrons_own_optimizer_and_an_engine_without() -> None:
    for differences, message in run_distributed(megatrons_optimizer, 2):
        assert max(differences) < 2e-5
        assert message == NO_OPTIMIZER


def set_up_by_the_user(rank: int) -> tuple[float, float, str, bool]:
    """A loss on groups that were there before, and that of one process; what others say; whether they outlive an engine."""
    from megatron.core import parallel_state

    mesh, data = mesh_of(tp=2), batches(1)
    parallel_state.initialize_model_parallel(2, 1, create_gloo_process_groups=False, distributed_timeout_minutes=1)
    engine = build(scheduled(small("gpt2"), mesh, data[0]), "megatron", optimizer=adamw)
    loss = engine.train_batch(**data[0]).item()
    engine.close()
    outlives = parallel_state.model_parallel_is_initialized()
    flat = mesh_of(dp=2)
    schedule = scheduled(small("gpt2"), flat, my_part(batches(2)[0], flat))
    message = message_of(lambda: build(schedule, "megatron", optimizer=adamw))
    parallel_state.destroy_model_parallel()
    return loss, small("gpt2")(**data[0]).loss.item(), message, outlives


def left_open(rank: int) -> tuple[str, str]:
    """Return the error while an engine for another mesh is open, and the result once it is closed."""
    mesh, flat = mesh_of(tp=2), mesh_of(dp=2)
    engine = build(scheduled(small("gpt2"), mesh, batches(1)[0]), "megatron", optimizer=adamw)

    def again() -> str:
        schedule = scheduled(small("gpt2"), flat, my_part(batches(2)[0], flat))
        return message_of(lambda: build(schedule, "megatron", optimizer=adamw).close())

    while_open = again()
    engine.close()
    return while_open, again()


def test_an_engine_left_open_is_named() -> None:
    for while_open, closed in run_distributed(left_open, 2):
        assert "for another mesh or other stages is still open in this process" in while_open
        assert while_open.endswith("call its engine.close() first")
        assert closed == "no error"


def test_groups_that_the_user_set_up() -> None:
    for loss, expected, message, outlives in run_distributed(set_up_by_the_user, 2):
        assert loss == pytest.approx(expected, abs=2e-5)
        assert outlives
        assert "megatron's parallel_state is set up with other groups along tp than the schedule's mesh" in message


def test_the_log_of_megatrons_training_script_is_read() -> None:
    parser: Any = get_dialect_cls("log_parser", "megatron", plugins=PLUGINS)
    line = (
        " [2026-01-01 00:00:00] iteration       10/     100 | consumed samples:          320 | elapsed time per iteration "
        "(ms): 250.0 | learning rate: 1.500000E-04 | global batch size:    32 | lm loss: 4.125000E+00 | loss scale: 1.0 | "
        "grad norm: 2.500 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    assert parser.parse(["loading", line]) == [(10, 4.125, 0.25, 1.5e-4, 2.5, 0, 32)]
