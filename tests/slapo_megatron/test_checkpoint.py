"""Checkpoints of the dialect: exactly on the same layout, and on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slapo_core.build import build
from slapo_core.testing import run_distributed
from tests.slapo_deepspeed.layouts import batches, my_part, small
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

from .layouts import scheduled

pytestmark = pytest.mark.multiproc


def engine_of(layout: dict[str, int], chunks: int = 1, name: str = "gpt2", **options: Any) -> tuple[Any, Any]:
    """An engine on a mesh, and the mesh."""
    mesh = mesh_of(**layout)
    schedule = scheduled(small(name), mesh, my_part(batches(2)[0], mesh), chunks)
    return build(schedule, "megatron", **{"optimizer": adamw, "microbatches": 2, **options}), mesh


def resumed(rank: int, layout: dict[str, int], chunks: int, options: dict[str, Any], folder: str) -> tuple[Any, Any]:
    """Losses of the last two of four steps, and those of an engine that was loaded before them."""
    data = batches(2)
    engine, mesh = engine_of(layout, chunks, **options)
    for batch in data[:2]:
        engine.train_batch(**my_part(batch, mesh))
    engine.save(folder)
    expected = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data[2:4]]
    engine.close()
    engine, _ = engine_of(layout, chunks, **options)
    engine.load(folder)
    found = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data[2:4]]
    engine.close()
    return found, expected


@pytest.mark.parametrize(
    ("layout", "chunks", "options"),
    [
        ({"dp": 2}, 1, {"distributed_optimizer": True, "precision": "bf16"}),
        ({"tp": 2}, 1, {"distributed_optimizer": True}),
        ({"pp": 2}, 2, {"precision": "bf16"}),
        ({"pp": 2}, 1, {"distributed_optimizer": True}),
    ],
    ids=str,
)
def test_saving_and_going_on(layout: dict[str, int], chunks: int, options: dict[str, Any], tmp_path: Path) -> None:
    for found, expected in run_distributed(resumed, 2, layout, chunks, options, str(tmp_path)):
        assert found == expected


def elsewhere(rank: int, layout: dict[str, int], chunks: int, options: dict[str, Any], folder: str, saves: bool) -> list[float]:
    """Losses of two more steps, behind two steps and a save, or behind a load."""
    engine, mesh = engine_of(layout, chunks, **options)
    data = batches(2)
    if saves:
        for batch in data[:2]:
            engine.train_batch(**my_part(batch, mesh))
        engine.save(folder)
    else:
        engine.load(folder)
    losses = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data[2:4]]
    engine.close()
    return losses


@pytest.mark.parametrize("shared", [False, True])
def test_any_other_layout_goes_on(shared: bool, tmp_path: Path) -> None:
    options = {"distributed_optimizer": shared, "lr_scheduler": None}
    expected = run_distributed(elsewhere, 2, {"dp": 2}, 1, options, str(tmp_path), True)[0]
    for layout, chunks in (({"dp": 1}, 1), ({"tp": 2}, 1), ({"pp": 2}, 1), ({"pp": 2}, 2)):
        ranks = 2 if layout != {"dp": 1} else 1
        found = run_distributed(elsewhere, ranks, layout, chunks, options, str(tmp_path), False)[0]
        assert found == pytest.approx(expected, abs=2e-5), layout


def refused(rank: int, folder: str) -> list[str]:
    engine, _ = engine_of({"dp": 2})
    messages = [message_of(lambda: engine.load(folder))]
    engine.save(folder)
    engine.close()
    for options in ({"distributed_optimizer": True}, {"name": "llama"}, {"precision": "bf16"}):
        engine, _ = engine_of({"dp": 2}, **options)
        messages.append(message_of(lambda engine=engine: engine.load(folder)))
        engine.close()
    return messages


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    first, second = run_distributed(refused, 2, str(tmp_path))
    assert first == second
    assert "is no complete checkpoint of this target: it has no slapo.json" in first[0]
    assert "saved with False for distributed_optimizer, but this engine has True; build with the same" in first[1]
    assert "is in the model, not the checkpoint; load it into the same model" in first[2]
    assert "saved with 'fp32' for precision, but this engine has 'bf16'" in first[3]
