"""Result of a schedule: the input of a dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..modules.forward_arguments import named_inputs
from ..modules.parameters import ShardSpec


class Renderable:
    """Object that a plugin's ``slapo_render`` shows in ``print`` and in notebooks; its ``repr`` if no plugin does."""

    __slots__ = ()
    _default_registry: ClassVar[Callable[[], Any]]  # set by the registry's module, which imports this one

    def __str__(self) -> str:
        return self._repr_html_(html=False) or repr(self)

    def _repr_html_(self, html: bool = True) -> str | None:
        """Return the result of the plugins of the object's own registry, if it has one, else of the installed ones."""
        registry: Any = getattr(self, "registry", None) or type(self)._default_registry()
        return registry.hook.slapo_render(subject=self, html=html)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Boundary:
    """One value that crosses into a stage from the stage before it.

    Args:
        name: Name in the flat graph; the same in every stage that the value passes through.
        shape: Shape for one micro-batch.
        dtype: Its dtype.
        requires_grad: True if a gradient flows back over this boundary.

    Example:
        >>> Boundary("hidden", (4, 128, 768), torch.bfloat16, requires_grad=True).shape[0]
        4
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Stage:
    """One pipeline stage.

    ``module(*received, **batch)`` takes the values of ``inputs`` in order, and by keyword the arguments of ``batch_inputs``;
    those of ``*args`` are one tuple, under its name. It returns a tuple of tensors: the next stage's ``inputs`` in order. The
    last stage returns the output of the model.

    Args:
        index: Position in the pipeline.
        module: The part of the model; its parameters keep their names in the whole model.
        inputs: Values received from the stage before; empty in the first.
        batch_inputs: Names of the model's arguments that this stage reads from the batch.
        paths: Modules of the whole model that this stage runs, for reports.

    Example:
        >>> stage = Stage(0, nn.Linear(4, 2), batch_inputs=("input",))
        >>> stage.module(input=torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    index: int
    module: nn.Module
    inputs: tuple[Boundary, ...] = ()
    batch_inputs: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class TieGroup:
    """One tied parameter that several stages use.

    Args:
        names: Its current names in the whole model.
        stages: Indices of the stages that use it, ascending, at least two.

    Example:
        >>> TieGroup(("wte.weight", "lm_head.weight"), stages=(0, 3)).stages
        (0, 3)
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Program(Renderable):
    """A scheduled model, split into one or more stages.

    Args:
        module: The whole scheduled model.
        stages: At least one.
        mesh: Device mesh with axes out of ``pp``, ``dp``, ``tp``, ranks row-major in this order; None in one process.
        shard_specs: Current parameter name to its shard specification; unsharded parameters are not listed.
        original_names: Current parameter name to its names in the unmodified model.
        ties: Tied parameters that several stages use.
        replan: ``replan(training, example_inputs)`` returns the same program for other input shapes or the other mode, on the
            same parameters, and caches it. None if the modules handle both.
        placement: Pipeline rank of each stage; empty if stage ``i`` runs on rank ``i % pp``.

    Example:
        >>> program = build_program(create_schedule(nn.Linear(4, 2)))
        >>> program(torch.ones(3, 4)).shape, program.axis_size("tp"), program.rank_of(0)
        (torch.Size([3, 2]), 1, 0)
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
        """Return the rank along the axis ``pp`` that runs a stage. One rank may run several stages."""
        return self.placement[stage] if self.placement else stage % self.axis_size("pp")

    def axis_size(self, axis: str) -> int:
        """Return the number of ranks along a mesh axis; 1 if the mesh has no such axis."""
        return self.mesh.get_group(axis).size() if self.mesh is not None and self._has_axis(axis) else 1

    def axis_rank(self, axis: str) -> int:
        """Return this rank's coordinate along a mesh axis; 0 if the mesh has no such axis."""
        return self.mesh.get_local_rank(axis) if self.mesh is not None and self._has_axis(axis) else 0

    def _has_axis(self, axis: str) -> bool:
        return self.mesh is not None and axis in (self.mesh.mesh_dim_names or ())

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in turn in this process for one micro-batch: the reference for every engine.

        Args:
            *args: Positional arguments of the model's forward.
            **kwargs: Its keyword arguments.
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
