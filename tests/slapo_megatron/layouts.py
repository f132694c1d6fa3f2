"""What the tests run on each rank: a model in some layout on Megatron-Core beside the unmodified model in one process."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import slapo_megatron.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
from slapo_core.build import build
from slapo_core.registry import Registry
from slapo_core.schedule import Schedule, create_schedule
from tests.slapo_deepspeed.layouts import batches, in_one_process, my_part, small
from tests.slapo_torch.layouts import adamw, mesh_of

PLUGINS = Registry([slapo_pipeline.plugin, slapo_sharding.plugin, slapo_megatron.plugin])


def scheduled(model: nn.Module, mesh: DeviceMesh, example: dict[str, Any], chunks: int = 1) -> Schedule:
    """A model sharded and cut as the mesh wants, into so many stages for each rank."""
    schedule = create_schedule(model, mesh=mesh, example_inputs=example, plugins=PLUGINS)
    if mesh["tp"].size() > 1:
        schedule.tensor_parallel()
    if mesh["pp"].size() > 1:
        schedule.pipeline(mesh["pp"].size() * chunks)
    return schedule


def train_beside_reference(
    rank: int, name: str, layout: dict[str, int], precision: str = "fp32", chunks: int = 1, clip: float = 0.1
) -> dict[str, float]:
    """Largest differences over five steps, of the weights after them, and of an evaluation, with either optimizer."""
    mesh = mesh_of(**layout)
    reference = small(name)
    data = batches(layout.get("dp", 1))
    expected = [*in_one_process(reference, data, clip)]
    weights = {key: value.detach() for key, value in reference.named_parameters(remove_duplicate=False)}
    last = reference.eval()(**data[0]).loss.item()
    worst: dict[str, float] = {"scale": max(loss for loss, _ in expected)}

    def note(what: str, difference: float) -> None:
        worst[what] = max(worst.get(what, 0.0), difference)

    for shared in (False, True):
        schedule = scheduled(small(name), mesh, my_part(data[0], mesh), chunks)
        options: dict[str, Any] = {"clip": clip, "precision": precision, "distributed_optimizer": shared}
        engine: Any = build(schedule, "megatron", optimizer=adamw, microbatches=2, **options)
        for batch, (loss, norm) in zip(data, expected, strict=True):
            note(f"loss {shared}", abs(engine.train_batch(**my_part(batch, mesh)).item() - loss))
            note(f"norm {shared}", abs(engine.grad_norm - norm))
        note(f"evaluation {shared}", abs(engine.eval_batch(**my_part(data[0], mesh)).item() - last))
        for key, value in schedule.full_state().items():
            assert value is not None
            note(f"weight {shared}", float((value.float() - weights[key]).abs().max()))
        engine.close()
    return worst
