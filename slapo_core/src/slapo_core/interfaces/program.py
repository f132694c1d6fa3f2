"""Result of a schedule: the only thing a dialect sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..modules.forward_arguments import named_inputs
from ..modules.parameters import ShardSpec
from .renderable import Renderable


@dataclass(frozen=True)
class Boundary:
    """One value that crosses into a stage from the stage before it.

    Args:
        name: Its name in the flat graph; the same in every stage it passes through.
        shape: Shape for one micro-batch.
        dtype: Its dtype.
        requires_grad: Whether a gradient flows back over this boundary.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Stage:
    """One pipeline stage.

    ``module(*received, **batch)`` takes the values named by ``inputs`` in order, and by keyword those ``batch_inputs`` it
    reads from the batch, the tensors of ``*args`` as a tuple under its name; it returns a tuple of tensors, the next stage's
    ``inputs`` in order; the last stage returns what the model returns.

    Args:
        index: Position in the pipeline.
        module: Its parameters keep their names in the whole model.
        inputs: Values received from the stage before; empty in the first.
        batch_inputs: Names of the model's arguments this stage reads from the batch.
        paths: Modules of the whole model that this stage runs, for reports.
    """

    index: int
    module: nn.Module
    inputs: tuple[Boundary, ...] = ()
    batch_inputs: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class TieGroup:
    """One parameter that several stages use.

    Args:
        names: Its current names in the whole model.
        stages: Indices of the stages that use it, ascending, at least two.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Program(Renderable):
    """A scheduled model, cut into one or more stages.

    Args:
        module: The whole scheduled model.
        stages: At least one.
        mesh: Device mesh with axes out of ``pp``, ``dp``, ``tp``, ranks row-major in this order; None in one process.
        shard_specs: Current parameter name to how it is sharded; whole parameters are not listed.
        original_names: Current parameter name to its names in the unmodified model.
        ties: Parameters that several stages use.
        replan: ``replan(training, example_inputs)`` gives the same program for other input shapes or the other mode,
            on the same parameters, and remembers it; None where the modules themselves handle both.
        placement: The pipeline rank of each stage, where they are not dealt out in turn; see ``rank_of``.
    """

    module: nn.Module
    stages: tuple[Stage, ...]
    mesh: DeviceMesh | None = None
    shard_specs: Mapping[str, ShardSpec] = field(default_factory=dict)
    original_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ties: tuple[TieGroup, ...] = ()
    replan: Callable[[bool, Mapping[str, Any]], Program] | None = None
    placement: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"Program({type(self.module).__name__}: {len(self.stages)} stage{'s' * (len(self.stages) > 1)})"

    def rank_of(self, stage: int) -> int:
        """The rank along the axis ``pp`` that runs a stage; several stages may be on one."""
        return self.placement[stage] if self.placement else stage % self.axis_size("pp")

    def axis_size(self, axis: str) -> int:
        """Number of ranks along a mesh axis; 1 where the mesh has no such axis."""
        if self.mesh is None or axis not in (self.mesh.mesh_dim_names or ()):
            return 1
        return self.mesh.get_group(axis).size()

    def axis_rank(self, axis: str) -> int:
        """This rank's coordinate along a mesh axis; 0 where the mesh has no such axis."""
        if self.mesh is None or axis not in (self.mesh.mesh_dim_names or ()):
            return 0
        return self.mesh.get_local_rank(axis)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in turn in this process, for one micro-batch: the reference for every engine.

        Args:
            *args: What the model's forward takes by position.
            **kwargs: What it takes by keyword.
        """
        if len(self.stages) == 1 and self.replan is None:
            return self.stages[0].module(*args, **kwargs)
        batch = named_inputs(self.module, args, kwargs)
        program = self.replan(self.module.training, batch) if self.replan is not None else self
        result: Any = ()
        for stage in program.stages:
            taken = batch if len(program.stages) == 1 else {name: batch[name] for name in stage.batch_inputs if name in batch}
            received = result if isinstance(result, tuple) else (result,)
            result = stage.module(*received, **taken)
        return result
