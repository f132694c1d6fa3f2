"""Running one stage of a pipeline on ``torch.distributed.pipelining``.

The one place that touches that package; what it relies on beyond its documentation is that the schedules call their stage's
``forward_one_chunk`` and ``backward_one_chunk`` and read its ``fwd_cache`` and ``bwd_cache``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from slapo_core.program import Boundary, Program

from .batches import Batch
from .options import Options
from .replicas import Replicas
from .stage_call import StageCall
from .step import StepResult

_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class RunningStage(PipelineStage):
    """A stage that takes its inputs by micro-batch number, and that never leaves its neighbours waiting.

    After an error it goes on sending what they wait for, as zeros; the engine refuses the step at its end on all ranks. With
    replicas the runtime sees their wrapper, which it keeps from reducing before the last backward.
    """

    def __init__(
        self, call: StageCall, program: Program, rank: int, result: StepResult, replicas: Replicas | None = None
    ) -> None:
        assert program.mesh is not None
        device = torch.device(program.mesh.device_type)
        last = rank == len(program.stages) - 1
        outputs = (torch.empty((), device="meta", requires_grad=True),) if last else _metas(call.outputs or ())
        super().__init__(
            call if replicas is None else replicas.wrapped,
            rank,
            len(program.stages),
            torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device,
            input_args=_metas(call.inputs),
            output_args=outputs,
            group=program.mesh["pp"].get_group(),
        )
        self.feed: list[dict[str, Any]] = []
        self.result = result
        self._num_inputs = len(call.inputs)
        self._outputs = outputs
        self._replicas = replicas

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Any:
        """Run the forward of one micro-batch; what the schedule passes as arguments is empty."""
        feed, run = self.feed[fwd_chunk_id], super().forward_one_chunk
        output = self._attempt("F", fwd_chunk_id, lambda: run(fwd_chunk_id, (), feed, False))
        if self.result.failure is not None:
            sent = tuple(torch.zeros(meta.shape, dtype=meta.dtype, device=self.device) for meta in self._outputs)
            self.fwd_cache[fwd_chunk_id] = (sent, [])
            return sent[0] if self.is_last else sent
        if self.is_last:
            self.result.losses.append(output.detach())
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of one micro-batch."""
        if not self.has_backward:
            return
        run = super().backward_one_chunk
        self._attempt("B", bwd_chunk_id, lambda: run(bwd_chunk_id, loss, full_backward, last_backward))
        if self.result.failure is not None:
            self.fwd_cache.pop(bwd_chunk_id, None)
            self.bwd_cache[bwd_chunk_id] = (None,) * self._num_inputs
        if last_backward and self._replicas is not None:
            self.result.unused = self._replicas.finish()

    def _attempt(self, kind: str, microbatch: int, run: Callable[[], Any]) -> Any:
        if self.result.failure is not None:
            return None
        start = time.time()
        try:
            return run()
        except Exception as err:
            # the runtime wraps what a forward raises
            self.result.failure = err.__cause__ if isinstance(err.__cause__, Exception) else err
            return None
        finally:
            self.result.record(self.stage_index, kind, microbatch, start)


class StagePlan:
    """One stage made ready for one shape of micro-batch, in one mode."""

    def __init__(self, program: Program, options: Options, training: bool, replicas: Replicas | None = None) -> None:
        assert program.mesh is not None
        self.program = program
        rank = program.axis_rank("pp")
        outputs = program.stages[rank + 1].inputs if rank + 1 < len(program.stages) else None
        self._names = program.stages[rank].batch_inputs
        self._training = training
        self._result = StepResult()
        call = StageCall(program.stages[rank], outputs, options, program.mesh.device_type)
        replicas = replicas if training else None
        self._stage = RunningStage(call, program, rank, self._result, replicas)
        self._call = {"call": call} if replicas is not None else {}
        schedule = _SCHEDULES[options.pipeline_schedule] if training else ScheduleGPipe
        # the loss comes scaled out of the last stage; without a loss function the schedule runs forwards only
        self._schedule = schedule(self._stage, options.microbatches, loss_fn=_identity if training else None, scale_grads=False)
        self._targets = torch.arange(options.microbatches)

    def run(self, parts: list[Batch], labels: list[Any]) -> StepResult:
        """Run all micro-batches, forward and, in training, backward; errors are in the result."""
        result = self._stage.result = StepResult()
        self._stage.feed = [
            {"batch": {name: part[name] for name in self._names if name in part}, "labels": label, **self._call}
            for part, label in zip(parts, labels, strict=True)
        ]
        with torch.set_grad_enabled(self._training):
            self._schedule.step(target=self._targets if self._training else None, return_outputs=False)
        self._stage.feed = []
        self._stage.clear_runtime_states()
        return result


def _metas(boundaries: tuple[Boundary, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(b.shape, dtype=b.dtype, device="meta", requires_grad=b.requires_grad) for b in boundaries)


def _identity(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output
