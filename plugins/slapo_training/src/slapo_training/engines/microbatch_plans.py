"""The stages of each micro-batch of a step, for engines that send the same for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slapo_core import BuildError, Program, Stage

from ..batches.rows import Batch


def microbatch_plans(program: Program, training: bool, parts: Sequence[Batch], engine: str) -> list[Program]:
    """Return the program for each micro-batch of a step: the same one, unless values or numbers of images make the difference.

    Raises:
        BuildError: what crosses between stages has another shape, or is missing, in some of them.
    """
    assert program.replan is not None
    plans = [program.replan(training, part) for part in parts]
    for number, plan in enumerate(plans):
        for stage, first in zip(plan.stages, plans[0].stages, strict=True):
            if (found := _difference(stage, first)) is not None:
                raise BuildError(
                    f"stage {stage.index} receives {found[0]} in micro-batch {number}, but {found[1]} in micro-batch 0, and "
                    f"{engine} sends the same for all micro-batches of a step; give each as many images, or build for 'torch'"
                )
    return plans


def _difference(stage: Stage, first: Stage) -> tuple[str, str] | None:
    pair: list[list[tuple[Any, ...]]] = [
        [(boundary.shape, boundary.dtype, boundary.requires_grad) for boundary in each.inputs] for each in (stage, first)
    ]
    if pair[0] == pair[1]:
        return None
    mine, other = (
        ", ".join(f"{boundary.name!r} {list(boundary.shape)}" for boundary in each.inputs) for each in (stage, first)
    )
    return mine or "nothing", other or "nothing"
