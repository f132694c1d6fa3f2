"""The stages that other ranks run: freed in this rank's memory, and the parameters that several ranks have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Program, successor


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
