"""Measured rates of operators on a device, while other ranks run the same."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, product
from math import prod
from statistics import quantiles
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..recording import OperatorRecorder
from ..records import OperatorRecord, Work
from .element_wise_calls import element_wise_calls
from .rate_curve import Curve

_Call = Callable[..., Any]
"""Call of an operator on two tensors, and one to change in place."""

_LASTS = 0.03
"""Seconds of each measurement."""
_KEPT_BYTES = 2**26
"""Memory that element-wise operators work on; less would stay in a core's cache."""


class OperatorTimer:
    """Measures operators in turn; all ranks measure the same one at the same time.

    Args:
        device: Device of this rank.
        align: Waits for all ranks.
        agree: Returns the mean of a number over the ranks.
        ranks: Number of these ranks.
        cores: Number of cores that they share.
    """

    def __init__(
        self, device: torch.device, align: Callable[[], Any], agree: Callable[[float], float], ranks: int, cores: int
    ) -> None:
        self._device = device
        self._align = align
        self._agree = agree
        # the time of one thread excludes that of other programs; ranks beyond the cores share them
        on_thread = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if on_thread else time.perf_counter
        self._share = max(1.0, ranks / cores) if on_thread else 1.0
        # once a large tensor was freed, as in training, glibc's malloc keeps the memory of smaller ones for the process
        del [torch.empty(2**23 - 2**12, device=device)][:]
        tiny = self._random(1)
        self._tiny = self._seconds(lambda: torch.add(tiny, tiny))

    def launch_seconds(self) -> tuple[float, float]:
        """Return the seconds of one operator of a tiny model, forward and backward, and what a checkpoint adds to each."""
        block = TinyBlock().to(self._device)
        given = self._random(1, 4, 16)

        def measure(forward: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, Sequence[Work]]:
            def step() -> None:
                torch.autograd.backward(forward(given).sum())

            step()
            with OperatorRecorder() as recorder:
                step()
            return self._seconds(step, 0.4), recorder.records

        seconds, records = measure(block)
        launch = seconds / len(records)
        seconds, records = measure(partial(checkpoint, block, use_reentrant=False))
        hooked = sum(isinstance(each, OperatorRecord) and each.hooked for each in records)
        return launch, max(0.0, seconds - launch * len(records)) / hooked

    def matmul(self) -> dict[str, list[tuple[float, float]]]:
        """Return FLOP/s by FLOPs of square products, by type."""
        found = {}
        for dtype in (torch.float32, torch.bfloat16):
            row: list[tuple[float, float]] = []
            for size in (32, 64, 128, 256, 512, 768, 1024, *((2048, 4096, 8192) if self._device.type == "cuda" else ())):
                factors = self._random(size, size, dtype=dtype), self._random(size, size, dtype=dtype)
                seconds = self._seconds(partial(torch.mm, *factors))
                row.append((2.0 * size**3, 2.0 * size**3 / max(seconds - self._tiny, seconds / 10)))
                if seconds > 0.25:
                    break
            found[_name(dtype)] = row
        return found

    def attention(self) -> dict[str, list[tuple[float, float]]]:
        """Return FLOP/s by FLOPs of one head of width 64, by type, mask and direction."""
        found: dict[str, list[tuple[float, float]]] = {}
        lengths = (32, 128, 512, 1024, *((4096,) if self._device.type == "cuda" else ()))
        for dtype, causal, length in product((torch.float32, torch.bfloat16), (False, True), lengths):
            query = self._random(1, 4, length, 64, dtype=dtype).requires_grad_()
            attend = partial(nn.functional.scaled_dot_product_attention, query, query, query, is_causal=causal)
            result = attend()
            # one tensor is query, key and value: their gradients are added, which is little beside the products
            back = partial(torch.autograd.grad, result, query, torch.ones_like(result), retain_graph=True)
            for direction, run, products in (("forward", attend, 2), ("backward", back, 5)):
                flops = products * 2.0 * length * length * 64
                key = f"{_name(dtype)} causal {direction}" if causal else f"{_name(dtype)} {direction}"
                found.setdefault(key, []).append((flops, 4 * flops / self._seconds(run)))
        return found

    def pointwise(self) -> list[tuple[float, float]]:
        """Return bytes a second of an addition by its bytes: two tensors read, a new one written."""
        return [self._rate(size, lambda x, y, _: torch.add(x, y)) for size in self._element_counts()]

    def in_place(self) -> list[tuple[float, float]]:
        """Return bytes a second of an addition in place by its bytes: two tensors read, one of them written."""
        return [self._rate(size, lambda x, _, state: state.add_(x)) for size in self._element_counts()]

    def operators(self, pointwise: list[tuple[float, float]], in_place: list[tuple[float, float]]) -> dict[str, float]:
        """Return the seconds of element-wise operators in units of an addition of as many bytes."""
        new, same, found = Curve(pointwise), Curve(in_place), {}
        pool = self._pool(512, 512)
        for run in element_wise_calls(self._random):
            with OperatorRecorder() as recorder:
                run(*pool[0])
            (record,) = recorder.records
            curve = same if record.name.endswith("_") else new
            seconds = self._seconds_in(pool, run) - self._tiny
            found[record.name] = max(seconds * curve.at(record.nbytes) / record.nbytes, 1e-3)
        return found

    def _element_counts(self) -> list[int]:
        return [2**power for power in (12, 14, 16, 18, 20, 22, *((24, 26, 28) if self._device.type == "cuda" else (23,)))]

    def _rate(self, size: int, run: _Call) -> tuple[float, float]:
        seconds = self._seconds_in(self._pool(size), run)
        return 12.0 * size, 12.0 * size / max(seconds - self._tiny, seconds / 10)

    def _pool(self, *shape: int) -> list[tuple[torch.Tensor, ...]]:
        """Return so many triples of tensors that they do not stay in a core's cache."""
        number = max(2, min(64, _KEPT_BYTES // (12 * prod(shape))))
        return [tuple(self._random(*shape) for _ in range(3)) for _ in range(number)]

    def _seconds_in(self, pool: list[tuple[torch.Tensor, ...]], run: _Call) -> float:
        """Return the seconds of one call on tensors of a pool in turn; results are kept for some time, as activations are."""
        given = cycle(pool)
        kept: deque[Any] = deque(maxlen=max(1, _KEPT_BYTES // (4 * pool[0][0].numel())) if len(pool) > 2 else 1)
        for _ in range(kept.maxlen or 0):  # the first results are written to new pages
            kept.append(run(*next(given)))
        return self._seconds(lambda: kept.append(run(*next(given))))

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(shape, device=self._device, dtype=torch.float32).to(dtype)

    def _seconds(self, run: Callable[[], Any], lasts: float = _LASTS) -> float:
        """Return the mean over ranks of the seconds of one run: a lower quartile, since other programs may disturb."""
        run()
        batch = max(1, int(lasts / 10 / self._once(run, 1)))
        self._align()
        times: list[float] = []
        end = time.perf_counter() + lasts
        while len(times) < 4 or time.perf_counter() < end:
            times.append(self._once(run, batch))
        return self._agree(quantiles(times, n=4)[0])

    def _once(self, run: Callable[[], Any], repeats: int) -> float:
        start = self._clock()
        for _ in range(repeats):
            run()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return max(1e-8, (self._clock() - start) * self._share / repeats)


class TinyBlock(nn.Module):
    """A tiny transformer block, whose operators take as long as their launch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.expand, self.shrink = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.activation, self.dropout = nn.GELU(), nn.Dropout(0.0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.expand(self.norm(hidden)).view(1, 4, 3, 2, 8).transpose(1, 3).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(1, 4, 16)
        hidden = hidden + self.dropout(self.shrink(mixed))
        result: torch.Tensor = hidden + self.shrink(self.activation(hidden) * 2)
        return result


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
