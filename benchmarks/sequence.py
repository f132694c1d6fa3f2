"""Sequence parallelism against hand-written code and DTensor: step time, and what a forward keeps.

Run ``python -m benchmarks.sequence``; it prints a section for ``benchmarks/README.md``. The blocks and the rounds are those of
``benchmarks.sharding``. By hand is Megatron's way: a column-parallel layer keeps its part of the gathered input, gathers it
again in the backward while it computes the input's gradient, and computes the weight's while that is reduced and scattered;
the gradients of norms and biases are summed together after the backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from benchmarks import sharding
from slapo_core import build, create_schedule
from slapo_testing import run_distributed

SPLIT = 1
"""The dimension of the sequence; collectives cut dimension 0."""


def _gather(x: torch.Tensor, *, wait: bool = True) -> tuple[torch.Tensor, Any]:
    parts = x.new_empty(dist.get_world_size(), *x.shape)
    return parts, dist.all_gather_single(parts, x.contiguous()[None], async_op=not wait)


def _joined(parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts.unbind(), SPLIT)


def _send_sums(x: torch.Tensor, *, wait: bool = True) -> tuple[torch.Tensor, Any]:
    rows = torch.stack(x.chunk(dist.get_world_size(), SPLIT))
    mine = torch.empty_like(rows[0])
    return mine, dist.reduce_scatter_single(mine[None], rows, async_op=not wait)


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(_joined(_gather(x)[0]), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        parts, gathering = _gather(x, wait=False)
        product = grad @ weight
        gathering.wait()
        mine, scattering = _send_sums(product, wait=False)
        rows = grad.flatten(0, -2)
        grads = rows.t() @ _joined(parts).flatten(0, -2), rows.sum(0)
        scattering.wait()
        return mine, *grads


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _send_sums(x)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _joined(_gather(grad)[0])


class _Piece(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(dist.get_world_size(), SPLIT)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _joined(_gather(grad)[0])


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _joined(_gather(x)[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.chunk(dist.get_world_size(), SPLIT)[dist.get_rank()].contiguous()


class Column(sharding.Column):
    """Hand-written: gathers its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _GatheredLinear.apply(x, self.weight, self.bias)


class Row(sharding.Row):
    """Hand-written: scatters its output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scattered.apply(F.linear(x, self.weight)) + self.bias


class ByHand(nn.Module):
    """The blocks between a scatter and a gather."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for block in model.children():
            block.qkv, block.up = Column(block.qkv), Column(block.up)
            block.proj, block.down = Row(block.proj), Row(block.down)
        self.blocks = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Whole.apply(self.blocks(_Piece.apply(x)))

    def finish(self) -> None:
        """Sum what each rank has a part of."""
        of = [tensor for block in self.blocks.children() for tensor in (*block.first.parameters(), *block.second.parameters())]
        of += [tensor for block in self.blocks.children() for tensor in (block.proj.bias, block.down.bias)]
        together = torch.cat([tensor.grad for tensor in of])
        dist.all_reduce(together)
        for tensor, grad in zip(of, together.split([tensor.numel() for tensor in of]), strict=True):
            tensor.grad.copy_(grad)


def ours(model: nn.Module, *, overlapped: bool = True) -> nn.Module:
    schedule = create_schedule(model)
    schedule.sync("fwd_pre", "scatter", axis=SPLIT).sync("fwd_post", "all_gather", axis=SPLIT)
    for block in schedule.select("*"):
        for name in ("first", "second"):
            block[name].sync("grad", "all_reduce")
        for name in ("qkv", "up"):
            block[name].sync("fwd_pre", "all_gather", axis=SPLIT).shard("weight", axis=0, blocks=1)
            if not overlapped:
                vars(block[name].mod).pop("forward", None)  # torch's own keeps the gathered input, and has one backward
        for name in ("proj", "down"):
            block[name].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=SPLIT)
    return build(schedule).module


def dtensor(model: nn.Module) -> nn.Module:
    mesh, parts = init_device_mesh("cpu", (dist.get_world_size(),)), Shard(SPLIT)
    plan = {
        "*.first": SequenceParallel(),
        "*.second": SequenceParallel(),
        **{f"*.{name}": ColwiseParallel(input_layouts=parts) for name in ("qkv", "up")},
        **{f"*.{name}": RowwiseParallel(output_layouts=parts, use_local_output=False) for name in ("proj", "down")},
    }
    parallelize_module(model, mesh, plan)
    whole = {"input_layouts": Replicate(), "desired_input_layouts": parts}
    parallelize_module(model, mesh, PrepareModuleInput(**whole))
    parallelize_module(model, mesh, PrepareModuleOutput(output_layouts=parts, desired_output_layouts=Replicate()))
    return model


WAYS: dict[str, sharding.Way] = {"slapo": ours, "hand-written": ByHand, "DTensor": dtensor, "whole": sharding.ours}
VARIANTS: dict[str, sharding.Way] = {
    "hand-written": ByHand,
    "slapo": ours,
    "slapo, neither gathers nor sums overlapped": partial(ours, overlapped=False),
    "slapo, the sequence whole": sharding.ours,
}


def arithmetic(hidden: int, ranks: int) -> int:
    """Bytes that a rank keeps less: of each block four values between layers, and two statistics of each norm."""
    positions = sharding.BATCH * sharding.SEQUENCE
    return sharding.LAYERS * 4 * (4 * positions * hidden + 2 * 2 * positions) * (ranks - 1) // ranks


def main() -> None:
    """Print the section."""
    print("\n## Sequence parallelism: 2 gloo ranks, 4 GPT blocks, forward and backward\n")
    print("| hidden | hand-written (ms) | slapo (ms) | slapo / hand-written | DTensor / hand-written", end="")
    print(" | memory, slapo / by hand | kept, slapo / by hand | kept less than without it / arithmetic |")
    print("|---|---|---|---|---|---|---|---|")
    for hidden in sharding.ROUNDS:
        found = run_distributed(sharding.measure_steps, 2, hidden, "benchmarks.sequence:WAYS", timeout=600)[0]
        mine, hand, peer, whole = (found[name] for name in WAYS)
        print(
            f"| {hidden} | {hand.seconds * 1e3:.1f} | {mine.seconds * 1e3:.1f} | {mine} | {peer} "
            f"| {mine.bytes / hand.bytes:.3f} | {mine.kept / hand.kept:.3f} "
            f"| {(whole.kept - mine.kept) / arithmetic(hidden, 2):.3f} |",
            flush=True,
        )
    sharding.report_variants("benchmarks.sequence:VARIANTS")


if __name__ == "__main__":
    main()
