"""Stage of ``torch.distributed.pipelining`` whose messages may differ in number and shape between micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from ._torch_pipelining import StageMeta, stage_meta

Tensors = tuple[torch.Tensor, ...]


class VaryingStage(PipelineStage):
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
        self._metas: list[StageMeta] = []
        if any(_message_layout(layout) != _message_layout(layouts[0]) for layout in layouts):
            self._metas = [stage_meta(*layout) for layout in layouts]

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
