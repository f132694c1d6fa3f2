"""Gloo for tensors on a GPU, by way of the CPU's memory: ranks can share one GPU, which nccl refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

Tensors = list[torch.Tensor]


class Staged(dist.ProcessGroup):
    """Collectives are over when they return; messages between two ranks are under way until they are waited for."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "staged"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        return self._run(tensors, lambda copies: self._gloo.allreduce(copies, opts or dist.AllreduceOptions()))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        return self._run(tensors, lambda copies: self._gloo.broadcast(copies, opts))

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self._run(output, lambda copies, given=given: self._gloo.allgather([copies], [given.cpu()]))
        return _over()

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return self.allgather([list(output.chunk(self.size())) for output in outputs], inputs)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [given])

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            sums, mean = given.to("cpu", copy=True), opts is not None and opts.reduceOp == dist.ReduceOp.AVG
            self._gloo.allreduce([sums], dist.AllreduceOptions()).wait()
            output.copy_(sums.chunk(self.size())[self.rank()].div(self.size() if mean else 1))
        return _over()

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [given], opts)

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], opts: Any = None
    ) -> Any:
        return self._run([output], lambda copies: self._gloo.alltoall_base(*copies, given.cpu(), [*out_sizes], [*in_sizes]))

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier().wait()
        return _over()

    def send(self, tensors: Tensors, rank: int, tag: int) -> Any:
        copies = [tensor.cpu() for tensor in tensors]
        return _UnderWay(self._gloo.send(copies, rank, tag), copies, [])

    def recv(self, tensors: Tensors, rank: int, tag: int) -> Any:
        copies = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        return _UnderWay(self._gloo.recv(copies, rank, tag), copies, tensors)

    def _run(self, tensors: Tensors, collective: Callable[[Tensors], Any]) -> Any:
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        collective(copies).wait()
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.detach().copy_(copy)
        return _over(tensors)


class _UnderWay(dist._Work):
    def __init__(self, work: Any, copies: Tensors, tensors: Tensors) -> None:
        super().__init__()
        self._work, self._copies, self._tensors = work, copies, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        for tensor, copy in zip(self._tensors, self._copies, strict=False):
            tensor.detach().copy_(copy)
        self._tensors = []
        return True


def _over(result: Tensors | None = None) -> Any:
    future: Future[Tensors] = Future()
    future.set_result(result or [])
    return torch._C._distributed_c10d._create_work_from_future(future)


def join(rank: int, size: int, path: str) -> None:
    """Leave the default process group for one of this kind.

    Args:
        rank: This rank.
        size: Number of ranks.
        path: A file that is not there yet, the same for all ranks.
    """
    if "staged" not in dist.Backend.backend_list:
        dist.Backend.register_backend("staged", Staged, devices=["cpu", "cuda"])
    store = dist.FileStore(path, size)
    store.set(f"joined {rank}", "")
    store.wait([f"joined {other}" for other in range(size)])  # leaving now would fail those that still join the first
    dist.destroy_process_group()
    dist.init_process_group("staged", store=store, rank=rank, world_size=size)
