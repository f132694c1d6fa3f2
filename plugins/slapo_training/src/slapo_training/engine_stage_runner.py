"""Runs of stages for estimates, as engines of other projects call them: weights of the engine's type, and the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from slapo_core import Program, successor

from .batch_arguments import arguments_of
from .batches import Batch, split, variadic_argument
from .losses import CountedLoss
from .options import EngineOptions
from .stage_forward import StageForward
from .step_model import OptimizerFactory, StageRunner

__all__ = ["EngineStageRunner", "flatten_parameters", "initialized_optimizer"]


class EngineStageRunner(StageRunner):
    """Runs stages as an engine of another project does, up to the values that they send.

    Subclasses add what the engine sends and receives, and its own tensors.
    """

    def __init__(self, program: Program, options: EngineOptions) -> None:
        self.program, self.options = program, options
        self._stages: dict[int, _PlannedStage] = {}

    def split(self, batch: Mapping[str, Any]) -> list[Batch]:
        module, options = self.program.module, self.options
        given = arguments_of(module, (), batch, options)
        parts = split(given, options.parts, several=variadic_argument(module), rows=options.batch_rows)
        return [tree_map_only(torch.Tensor, self._cast, part) for part in parts]

    def plan(self, program: Program, part: Batch) -> Program:
        return super().plan(program, self.options.model_arguments(part))

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.options.dtype) if tensor.dtype is torch.float32 else tensor

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Put meta tensors of the engine's type in place of float32 parameters and buffers inside."""
        swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        made: dict[int, torch.Tensor] = {}
        trees = (self.program.module, *(stage.module for stage in self.program.stages))
        modules = {id(module): module for tree in trees for module in tree.modules()}
        try:
            for module in modules.values() if self.options.dtype is not torch.float32 else ():
                tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for table in tables:
                    for name, tensor in table.items():
                        if tensor is not None and tensor.dtype is torch.float32:
                            swapped.append((table, name, tensor))
                            data = torch.empty_like(tensor, dtype=self.options.dtype, device="meta")
                            table[name] = made.setdefault(id(tensor), successor(tensor, data))
            yield
        finally:
            for table, name, tensor in swapped:
                table[name] = tensor

    def run_stage(self, program: Program, stage: int, received: Sequence[torch.Tensor], part: Batch) -> Any:
        """Run the forward of a stage; return its values for the next one, or the loss."""
        if (found := self._stages.get(stage)) is None or found.program is not program:
            found = self._stages[stage] = _PlannedStage(program, stage, self.options)
        return found.run(part, received)


def initialized_optimizer(factory: OptimizerFactory, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer that has its state, as after a first step; the parameters have no gradients.

    Args:
        factory: Makes it.
        parameters: What it steps, e.g. fake tensors.
    """
    optimizer = factory([*parameters])
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    return optimizer


def flatten_parameters(
    module: nn.Module, flat: torch.Tensor, starts: Iterable[tuple[nn.Parameter, int]]
) -> dict[int, nn.Parameter]:
    """Put views of one flat tensor in the place of a module's parameters; return them by the ``id`` of the former ones.

    Args:
        module: Module that holds them, at one or several places.
        flat: The flat tensor.
        starts: Parameters, each with the index of its first element in ``flat``.
    """
    views: dict[int, Any] = {}
    for old, start in starts:
        views[id(old)] = successor(old, flat.narrow(0, start, old.numel()).view(old.shape))
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if id(parameter) in views:
                each._parameters[name] = views[id(parameter)]
    return views


class _PlannedStage(StageForward):
    def __init__(self, program: Program, index: int, options: EngineOptions) -> None:
        super().__init__(program, index, CountedLoss(options.loss_fn, options.output_loss))
        self.program, self._takes_labels = program, options.loss_fn is not None
        self._begin([program], None)

    def run(self, part: Batch, received: Sequence[torch.Tensor]) -> Any:
        arguments = dict(part)
        labels = arguments.pop("labels", None) if self._takes_labels else None
        return self._run(0, arguments, labels, received)
