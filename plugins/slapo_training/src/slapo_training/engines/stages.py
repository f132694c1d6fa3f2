"""Stages of a program in an engine: those of each micro-batch, those that other ranks run, and parameters in several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, Program, Stage, successor

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


def release_others(program: Program, mine: Iterable[nn.Module], cast: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Free the parameters that only other ranks use: their places get meta tensors of the same facts.

    They and the buffers get the type that the engine gives to those of this rank's stages, so that plans of the whole model,
    for batches of other shapes, are right.
    """
    kept = {id(tensor) for module in mine for tensor in [*module.parameters(), *module.buffers()]}
    made: dict[int, Any] = {}
    for tree in (program.module, *(stage.module for stage in program.stages)):
        for module in tree.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is None or id(tensor) in kept:
                        continue
                    if (new := made.get(id(tensor))) is None:
                        data = cast(tensor.detach())
                        data = data.to("meta") if isinstance(tensor, nn.Parameter) else data
                        new = made[id(tensor)] = successor(tensor, data)
                        kept.add(id(new))
                    table[name] = new


class Tie(NamedTuple):
    """A tied parameter of this rank, the group of the ranks that have it, and the first of these."""

    parameter: nn.Parameter
    group: dist.ProcessGroup
    first: int


def tied_groups(
    program: Program, group_of: Callable[[tuple[int, ...], list[int]], Any] = lambda places, ranks: dist.new_group(ranks)
) -> list[Tie]:
    """Return this rank's tied parameters. Collective.

    ``group_of`` makes or finds the group of some ranks, given those along ``pp`` and all of them.
    """
    found = [(parameter, group_of(places, ranks), ranks) for parameter, places, ranks in copies(program)]
    return [Tie(parameter, group, ranks[0]) for parameter, group, ranks in found if dist.get_rank() in ranks]


def copies(program: Program) -> Iterator[tuple[nn.Parameter, tuple[int, ...], list[int]]]:
    """The parameters that several ranks along ``pp`` have, each once for every replica and tensor-parallel rank.

    Yields:
        The parameter, these ranks along ``pp``, and their numbers in the job, both ascending; the same on every rank.
    """
    if program.mesh is None:
        return
    named = dict(program.module.named_parameters(remove_duplicate=False))
    grid = program.mesh.mesh.reshape([program.axis_size(axis) for axis in ("pp", "dp", "tp")])
    for tie in program.ties:
        places = tuple(sorted({program.rank_of(stage) for stage in tie.stages}))
        for ranks in grid[list(places)].flatten(1).T.tolist() if len(places) > 1 else ():
            yield named[tie.names[0]], places, ranks
