"""This rank's stages of a pipeline on ``torch.distributed.pipelining``.

Beyond that package's documentation and the names in ``_torch_pipelining``, this module relies on the facts that ``ExactStage``
relies on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Boundary, Program
from slapo_training.batches import Batch
from slapo_training.losses import note_failure

from .gradients.reduction import DDPReplicas
from .options import Options
from .pipelining._torch_pipelining import VaryingStage, has_split_backward, make_runtime
from .pipelining.schedules import kind_of
from .step.gradient_accumulation import StepResult
from .step.stage_call import MicroBatchWeight, StageCall


class RunningStage(VaryingStage):
    """Stage that takes its inputs by micro-batch index and keeps sending messages after an error.

    After an error it sends zeros, so that no neighbour waits; the engine refuses the step at its end on all ranks. With
    replicas the runtime sees the DDP wrapper, and prevents its reduction before the last backward.
    """

    def __init__(
        self, calls: Sequence[StageCall], program: Program, index: int, result: StepResult, replicas: DDPReplicas | None = None
    ) -> None:
        assert program.mesh is not None
        device = torch.device(program.mesh.device_type)
        last = index == len(program.stages) - 1
        loss = (torch.empty((), device="meta", requires_grad=True),)
        layouts = [(_metas(call.inputs), loss if last else _metas(call.outputs or ())) for call in calls]
        super().__init__(
            calls[0] if replicas is None else replicas.wrapped,
            index,
            len(program.stages),
            torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device,
            layouts,
            program.mesh["pp"].get_group(),
        )
        self.trained = nn.ModuleList(calls)
        self._layouts = layouts
        self.feed: list[dict[str, Any]] = []
        self.result = result
        self._replicas = replicas
        self._receiving: dict[tuple[str, int], float] = {}

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Any:
        """Run the forward of one micro-batch, with inputs of ``feed``; the schedule's own arguments are empty."""
        self._select(fwd_chunk_id)
        self._record_arrival("RECV_F", fwd_chunk_id)
        feed, run = self.feed[fwd_chunk_id], super().forward_one_chunk
        output = self._run_and_note_error("F", fwd_chunk_id, lambda: run(fwd_chunk_id, (), feed, False))
        if self.result.failure is not None:
            if self.is_last:
                note_failure(feed["labels"], self.result.failure)
            sent = tuple(
                torch.zeros(meta.shape, dtype=meta.dtype, device=self.device) for meta in self._layouts[fwd_chunk_id][1]
            )
            self.fwd_cache[fwd_chunk_id] = (sent, [])
            return sent[0] if self.is_last else sent
        if self.is_last:
            self.result.add(output)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of one micro-batch, or its first part: gradients of the stage's inputs."""
        if not self.has_backward:
            return
        self._select(bwd_chunk_id)
        self._record_arrival("RECV_B", bwd_chunk_id)
        run, kind = super().backward_one_chunk, "B" if full_backward else "I"
        self._run_and_note_error(kind, bwd_chunk_id, lambda: run(bwd_chunk_id, loss, full_backward, last_backward))
        if self.result.failure is not None:
            self.fwd_cache.pop(bwd_chunk_id, None)
            self.bwd_cache[bwd_chunk_id] = (None,) * self._num_inputs(bwd_chunk_id)
        if last_backward and self._replicas is not None:
            self.result.unused = self._replicas.finish()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the second part of a backward: gradients of the stage's parameters; nothing if the first part ran all."""
        run = super().backward_weight_one_chunk
        if self.has_backward:
            self._run_and_note_error("W", bwd_chunk_id, lambda: run(bwd_chunk_id, last_backward))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _renew(self.args_recv_info[fwd_chunk_id])
        return self._record_message_start("RECV_F", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _renew(self.grad_recv_info.get(bwd_chunk_id, ()))
        return self._record_message_start("RECV_B", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._record_message_start("SEND_F", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._record_message_start("SEND_B", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def _record_message_start(self, kind: str, microbatch: int, messages: list[dist.P2POp]) -> list[dist.P2POp]:
        if messages and kind.startswith("RECV"):
            self._receiving[kind, microbatch] = time.time()
        elif messages:
            self.result.record(self.stage_index, kind, microbatch, time.time())
        return messages

    def _record_arrival(self, kind: str, microbatch: int) -> None:
        if (start := self._receiving.pop((kind, microbatch), None)) is not None:
            self.result.record(self.stage_index, kind, microbatch, start)

    def begin(self, feed: list[dict[str, Any]], result: StepResult) -> None:
        """Begin a step. The result receives losses, errors and actions."""
        self.feed, self.result = feed, result

    def clear_runtime_states(self) -> None:
        """Clear the state of an earlier step, which may have failed."""
        super().clear_runtime_states()
        self._receiving.clear()

    def _num_inputs(self, microbatch: int) -> int:
        return len(self._layouts[microbatch][0])

    def _run_and_note_error(self, kind: str, microbatch: int, run: Callable[[], Any]) -> Any:
        if self.result.failure is not None:
            return None
        start = time.time()
        try:
            return run()
        except Exception as err:
            # the runtime wraps errors of a forward
            self.result.failure = err.__cause__ if isinstance(err.__cause__, Exception) else err
            return None
        finally:
            self.result.record(self.stage_index, kind, microbatch, start)


class StagePlan:
    """This rank's stages, prepared for micro-batches of given shapes in one mode.

    Args:
        replicas: DDP of the stage, with one stage per rank; or None.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        options: Options,
        schedule: tuple[str, int],
        own_stages: tuple[int, ...],
        training: bool,
        replicas: DDPReplicas | None = None,
    ) -> None:
        self.programs = programs
        self._training = training
        replicas = replicas if training else None
        result = StepResult()
        made = {(id(each), index): _call(each, index, options) for each in programs for index in own_stages}
        self._calls = {index: [made[id(each), index] for each in programs] for index in own_stages}
        self._stages = [RunningStage(calls, programs[0], index, result, replicas) for index, calls in self._calls.items()]
        name, microbatches = schedule
        # the last stage returns the weighted loss
        loss_fn = (lambda output, target: output) if training else None
        self._schedule = make_runtime(name, kind_of(name).runtime, self._stages, microbatches, loss_fn)
        for stage in self._stages:
            stage.splits = has_split_backward(self._schedule)
        self._targets = torch.arange(microbatches)

    def is_plan_of(self, programs: Sequence[Program]) -> bool:
        """Return True if the plan was made of these same programs."""
        return all(own is other for own, other in zip(self.programs, programs, strict=True))

    @property
    def modules(self) -> list[nn.Module]:
        return [stage.module for program in self.programs for stage in program.stages]

    def run(self, parts: list[Batch], labels: list[Any], weight: MicroBatchWeight) -> StepResult:
        """Run all micro-batches forward and, in training, backward; the result has the first error."""
        result = StepResult()
        for stage in self._stages:
            calls, feed = self._calls[stage.stage_index], []
            for program, call, part, label in zip(self.programs, calls, parts, labels, strict=True):
                call.begin(weight, result.counted if stage.is_last else [])
                names = program.stages[stage.stage_index].batch_inputs
                feed.append({"batch": {name: part[name] for name in names if name in part}, "labels": label, "call": call})
            stage.begin(feed, result)
        with torch.set_grad_enabled(self._training):
            self._schedule.step(target=self._targets if self._training else None, return_outputs=False)
        for stage in self._stages:
            stage.begin([], result)
            stage.clear_runtime_states()
        return result


def _renew(received: tuple[Any, ...]) -> None:
    """Allocate new receive buffers for each step; a model may keep a received tensor or register a hook on it."""
    for info in received:
        if info.buffer is not None:
            info.buffer = torch.empty_like(info.buffer, requires_grad=info.buffer.requires_grad)


def _call(program: Program, index: int, options: Options) -> StageCall:
    assert program.mesh is not None
    outputs = program.stages[index + 1].inputs if index + 1 < len(program.stages) else None
    return StageCall(program.stages[index], outputs, options, program.mesh.device_type)


def _metas(boundaries: tuple[Boundary, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(b.shape, dtype=b.dtype, device="meta", requires_grad=b.requires_grad) for b in boundaries)
