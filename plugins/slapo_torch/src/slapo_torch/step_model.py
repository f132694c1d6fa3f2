"""How target ``torch`` runs a step, for the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slapo_core import Program
from slapo_training.batch_arguments import arguments_of
from slapo_training.batches import Batch, split, variadic_argument
from slapo_training.step_model import StepModel

from .options import Options
from .pipelining.schedules import schedule_for_batch
from .step.stage_call import StageCall


class TorchStepModel(StepModel):
    """Steps of ``TorchEngine``."""

    def __init__(self, program: Program, config: Mapping[str, Any]) -> None:
        self.program, self.options = program, Options.of(config)
        self._device = program.mesh.device_type if program.mesh is not None else "cpu"

    def split(self, args: Sequence[Any], batch: Mapping[str, Any]) -> list[Batch]:
        module, rows = self.program.module, self.options.batch_rows
        given = arguments_of(module, tuple(args), dict(batch), self.options)
        self.schedule, number = schedule_for_batch(
            self.options.pipeline_schedule, self.program, self.options.microbatches, rows.count(given)
        )
        return split(given, number, several=variadic_argument(module), rows=rows)

    def forward(self, program: Program, stage: int, received: Sequence[torch.Tensor], part: Batch) -> Any:
        last = stage + 1 == len(program.stages)
        call = StageCall(
            program.stages[stage], None if last else program.stages[stage + 1].inputs, self.options, self._device
        )
        labels = part.get("labels") if self.options.loss_fn is not None else None
        names = program.stages[stage].batch_inputs
        arguments = {name: value for name, value in part.items() if not (name == "labels" and self.options.loss_fn is not None)}
        if len(program.stages) > 1:
            arguments = {name: arguments[name] for name in names if name in arguments}
        return call(*received, batch=arguments, labels=labels)
