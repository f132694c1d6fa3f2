"""Private names of ``torch.distributed.pipelining`` that this package uses; a test fails when torch moves one.

A schedule of torch is a list of actions per rank: ``2F0`` is the forward of stage 2 for micro-batch 0, ``2B0`` its backward,
``2I0`` and ``2W0`` its backward in two parts, and ``2SEND_F0`` and the like its messages.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import _derive_grad_metas, _StageMeta, extract_tensor_metas

from slapo_core import BuildError
from slapo_training import ExactStage, PipelineAction

FORWARDS = (schedules.FORWARD, schedules.SEND_F, schedules.RECV_F)


def make_runtime(
    schedule: str,
    runtime: str,
    stages: Sequence[pipelining.PipelineStage],
    microbatches: int,
    loss_fn: Callable[..., Any] | None,
) -> Any:
    """Return torch's runtime of a schedule for this rank's stages; without ``loss_fn`` it runs forwards only.

    Args:
        runtime: Class name of the runtime; empty for a file.
        loss_fn: ``loss_fn(output, target)``; the runtime does not scale its losses.

    Raises:
        BuildError: two ranks would receive messages in another order than they are sent.
    """
    if runtime in ("Schedule1F1B", "ScheduleGPipe"):
        single = getattr(pipelining, runtime if loss_fn is not None else "ScheduleGPipe")
        return single(stages[0], microbatches, loss_fn=loss_fn, scale_grads=False)
    if runtime:
        made = getattr(pipelining, runtime)([*stages], microbatches, loss_fn=loss_fn, scale_grads=False)
    else:
        runtime_class: Any = schedules._PipelineScheduleRuntime
        made = runtime_class([*stages], microbatches, loss_fn=loss_fn, scale_grads=False)
        made._load_csv(schedule)
    check_order(made.pipeline_order_with_comms, made.stage_index_to_group_rank)
    if loss_fn is None:
        actions = {rank: _flatten_actions(row) for rank, row in made.pipeline_order_with_comms.items()}
        made.pipeline_order_with_comms = {
            rank: [action for action in row if action.computation_type in FORWARDS] for rank, row in actions.items()
        }
    return made


def has_split_backward(runtime: Any) -> bool:
    """Return True if a runtime of ``make_runtime`` splits backwards in two."""
    rows = getattr(runtime, "pipeline_order_with_comms", {}).values()
    return any(action.computation_type == schedules.BACKWARD_WEIGHT for row in rows for action in _flatten_actions(row))


@lru_cache(maxsize=8)
def order_of(runtime: str, stages: int, ranks: int, microbatches: int) -> dict[int, list[PipelineAction]]:
    """Return the computations of each rank by one of torch's schedules of several stages per rank.

    torch's constructor computes the order of all ranks from numbers alone. The messages, which take most of its time, are left
    out.
    """
    plain = {"_prepare_schedule_with_comms": _ignore, "_add_bubbles_to_actions": lambda self, _: self.pipeline_order}
    kind = type(runtime, (getattr(pipelining, runtime),), plain)
    place = SimpleNamespace(num_stages=stages, group_size=ranks, group_rank=0, submod=None)
    return _computations(kind([place] * (stages // ranks), microbatches).pipeline_order)


def _ignore(*_: Any) -> None:
    """Do nothing."""


def order_in(path: str, stages: int, ranks: int, microbatches: int) -> dict[int, list[PipelineAction]]:
    """Return the computations of each rank in a CSV file.

    Raises:
        BuildError: the file is not a complete schedule for so many stages, ranks and micro-batches.
    """
    return _computations(_read(path, stages, ranks, microbatches)[0])


def placement_in(path: str, stages: int, ranks: int, microbatches: int) -> tuple[int, ...]:
    """Return the rank of each stage in a CSV file.

    Raises:
        BuildError: the file is not a complete schedule for so many stages, ranks and micro-batches.
    """
    ranks_of = _read(path, stages, ranks, microbatches)[1]
    return tuple(ranks_of[stage] for stage in range(stages))


_COMPUTATIONS = {
    schedules.FORWARD: "F",
    schedules.FULL_BACKWARD: "B",
    schedules.BACKWARD_INPUT: "I",
    schedules.BACKWARD_WEIGHT: "W",
}


def _computations(rows: Mapping[int, Sequence[Any]]) -> dict[int, list[PipelineAction]]:
    return {
        rank: [
            PipelineAction(kind, action.stage_index, action.microbatch_index)
            for action in _flatten_actions(row)
            if (kind := _COMPUTATIONS.get(action.computation_type)) is not None
        ]
        for rank, row in rows.items()
    }


def _read(path: str, stages: int, ranks: int, microbatches: int) -> tuple[dict[int, list[Any]], dict[int, int]]:
    """Return the rows of a CSV file by rank, and the rank of each stage."""
    try:
        with open(path, newline="") as file:
            rows = {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(file))}
        ranks_of = schedules._validate_schedule(rows, ranks, stages, microbatches)
    except (AssertionError, RuntimeError, ValueError, KeyError) as err:
        why = str(err).splitlines()[0].replace("_ComputationType.", "") if str(err) else type(err).__name__
        raise BuildError(
            f"{path!r} is not a schedule for {stages} stages on pp={ranks} with {microbatches} micro-batches: {why}"
        ) from err
    return rows, ranks_of


def check_order(actions: Mapping[int, Sequence[Any]], ranks: Mapping[int, int]) -> None:
    """Check that each rank receives messages of another rank in the order in which that rank sends them.

    Point-to-point messages have no tags: with another order a value would be taken for another one.

    Raises:
        BuildError: the orders differ.
    """
    sent: dict[tuple[int, int], list[tuple[Any, ...]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[Any, ...]]] = defaultdict(list)
    for rank, row in actions.items():
        for action in _flatten_actions(row):
            stage, microbatch = action.stage_index, action.microbatch_index
            step = {schedules.SEND_F: 1, schedules.RECV_F: -1, schedules.SEND_B: -1, schedules.RECV_B: 1}
            if (away := step.get(action.computation_type)) is None:
                continue
            other, forward = stage + away, action.computation_type in FORWARDS
            if action.computation_type in (schedules.SEND_F, schedules.SEND_B):
                sent[rank, ranks[other]].append((stage, other, forward, microbatch))
            else:
                received[ranks[other], rank].append((other, stage, forward, microbatch))
    for pair in sent.keys() | received.keys():
        if sent[pair] != received[pair]:
            raise BuildError(
                f"by the schedule, rank {pair[1]} receives from rank {pair[0]} in another order than rank {pair[0]} sends; "
                "values would be taken for others"
            )


def _flatten_actions(row: Sequence[Any]) -> Iterator[Any]:
    """Iterate over single actions; some schedules overlap a forward and a backward in one action."""
    return (single for action in row if action is not None for single in (action.sub_actions or (action,)))


Tensors = tuple[torch.Tensor, ...]


class VaryingStage(ExactStage):
    """Stage with one message layout per micro-batch; torch's stage has one layout for all micro-batches.

    Images are an example: image features vary in shape with the number of images, and are missing without images. The layouts
    are meta tensors that the stage receives and sends, per micro-batch.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device,
        layouts: Sequence[tuple[Tensors, Tensors]],
        group: dist.ProcessGroup,
    ) -> None:
        inputs, outputs = layouts[0]
        super().__init__(module, index, num_stages, device, input_args=inputs, output_args=outputs, group=group)
        self._metas: list[_StageMeta] = []
        if any(_message_layout(layout) != _message_layout(layouts[0]) for layout in layouts):
            for layout in layouts:
                metas = [extract_tensor_metas(tensors) or () for tensors in layout]
                self._metas.append(_StageMeta(*metas, *map(_derive_grad_metas, metas)))

    def _select(self, microbatch: int) -> None:
        if self._metas:
            self._stage_meta = self._metas[microbatch]
            self._setup_forward_send_info()
            self.grad_send_info = None if self.is_first else [self.stage_index - 1] * len(self._stage_meta.inputs or ())

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        received = {}
        for microbatch in range(len(self._metas)):
            self._select(microbatch)
            self._setup_forward_recv_info(num_microbatches, self.has_backward)
            received[microbatch] = self.args_recv_info[microbatch]
        self.args_recv_info.update(received)
        return prepared

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_backward_infra(num_microbatches, *args, **kwargs)
        for microbatch in range(len(self._metas)):
            self._select(microbatch)
            self.grad_recv_info[microbatch] = self._create_grad_recv_info(self.act_send_info)
        return prepared

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._select(fwd_chunk_id)
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._select(bwd_chunk_id)
        return super().get_bwd_send_ops(bwd_chunk_id)


def _message_layout(layout: tuple[Tensors, Tensors]) -> list[Any]:
    return [[(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors] for tensors in layout]
