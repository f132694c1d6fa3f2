"""Gradient buffers of Megatron's ``DistributedDataParallel``: sizes, padding and buckets."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

_PARAMETER_ALIGNMENT = 64
"""Elements to which the distributed optimizer pads the start of a parameter."""
_BUCKET_ALIGNMENT = 128
"""Elements to which the distributed optimizer pads the end of a bucket, beside the number of replicas."""
_LARGE_ALIGNMENT = 2**16


class Bucket(NamedTuple):
    """Range of a gradient buffer that is reduced at once.

    Args:
        start: Index of its first element.
        stop: Index after its last element, padding included.
    """

    start: int
    stop: int


class BufferLayout:
    """Positions of parameters in one gradient buffer, which holds them in the opposite order.

    Args:
        parameters: Trained parameters of one type.
        replicas: Number of data-parallel ranks.
        is_sharded: True with the distributed optimizer, which pads parameters and buckets.
        settings: Section ``ddp`` of Megatron's configuration.
        bucket_size: Elements after which a bucket ends; None for one bucket.
        tied: Parameters, by ``id``, that other ranks along ``pp`` hold too; with the distributed optimizer each has
            a bucket of its own.

    Attributes:
        starts: Index of the first element of each parameter, by its ``id``.
        buckets: Its buckets, in order.
        numel: Number of elements, padding included.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        replicas: int,
        is_sharded: bool,
        settings: Mapping[str, Any],
        bucket_size: int | None,
        tied: Collection[int] = (),
    ) -> None:
        self._is_sharded = is_sharded
        self._divisor = math.lcm(replicas, _BUCKET_ALIGNMENT)
        if settings.get("pad_buckets_for_high_nccl_busbw"):
            self._divisor = math.lcm(self._divisor, _LARGE_ALIGNMENT)
        self.starts: dict[int, int] = {}
        self._sizes = {id(each): each.numel() for each in parameters}
        self.buckets: list[Bucket] = []
        begin = at = 0
        for parameter in reversed(parameters):
            at = _round_up(at, _PARAMETER_ALIGNMENT) if is_sharded else at
            alone = is_sharded and id(parameter) in tied
            if alone and at > begin:
                at = begin = self._end_bucket(begin, at)
            self.starts[id(parameter)] = at
            at += parameter.numel()
            if alone or (bucket_size is not None and at - begin >= bucket_size):
                at = begin = self._end_bucket(begin, at)
        if at > begin:
            self._end_bucket(begin, at)
        self.numel = self.buckets[-1].stop if self.buckets else 0

    def _end_bucket(self, begin: int, end: int) -> int:
        stop = _round_up(end, self._divisor) if self._is_sharded else end
        self.buckets.append(Bucket(begin, stop))
        return stop

    def stepped_elements(self, replicas: int) -> list[int]:
        """Return the number of elements that the optimizer of each replica steps, without padding."""
        found = [0] * replicas
        for key, start in self.starts.items():
            bucket = next(each for each in self.buckets if each.start <= start < each.stop)
            step, stop = (bucket.stop - bucket.start) // replicas, start + self._sizes[key]
            for replica in range((start - bucket.start) // step, (stop - 1 - bucket.start) // step + 1):
                low = bucket.start + replica * step
                found[replica] += min(stop, low + step) - max(start, low)
        return found

    def local_range(self, parameter: nn.Parameter, rank: int, replicas: int) -> tuple[int, int]:
        """Return the elements of a parameter that a replica's optimizer steps, as a range that may be empty."""
        start = self.starts[id(parameter)]
        bucket = next(each for each in self.buckets if each.start <= start < each.stop)
        step = (bucket.stop - bucket.start) // replicas
        low = bucket.start + rank * step
        first = max(low, start) - start
        return first, max(first, min(low + step, start + parameter.numel()) - start)


def bucket_size(settings: Mapping[str, Any], replicas: int, may_split: bool) -> int | None:
    """Return the number of elements after which a bucket ends, or None for one bucket.

    Args:
        settings: Section ``ddp`` of Megatron's configuration.
        replicas: Number of data-parallel ranks.
        may_split: True for the first stage of the first rank along ``pp``.
    """
    if not settings.get("overlap_grad_reduce") or not may_split:
        return None
    return int(settings.get("bucket_size") or max(40_000_000, 1_000_000 * replicas))


def buffer_layouts(
    parameters: Sequence[nn.Parameter],
    replicas: int,
    is_sharded: bool,
    settings: Mapping[str, Any],
    size: int | None,
    tied: Collection[int] = (),
) -> list[tuple[list[nn.Parameter], torch.dtype, BufferLayout]]:
    """Return the buffers of some parameters: for each its parameters, the type of the gradients and the layout."""
    in_fp32 = settings.get("grad_reduce_in_fp32", True)
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    return [
        (group, torch.float32 if in_fp32 else dtype, BufferLayout(group, replicas, is_sharded, settings, size, tied))
        for dtype, group in by_dtype.items()
    ]


def _round_up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
