"""Times at which the ranks of one pipeline run their actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from slapo_training import MessageMode, PipelineAction

Order = Mapping[int, Sequence[PipelineAction]]
"""Actions of each rank along ``pp``, in the order in which it runs them."""


@dataclass(frozen=True)
class PipelineRun:
    """Times of one run of a pipeline, in seconds from its start.

    Args:
        order: Actions of each rank.
        starts: Start of each action of each rank.
        ends: End of each action of each rank.
        waits: Time from which a rank could have run each action: the receive of its input begins.
        messages: Departure of each message between ranks, by kind, sending stage and micro-batch; sends are ``"SEND_F"``
            and ``"SEND_B"``.
    """

    order: Order
    starts: Mapping[int, Sequence[float]]
    ends: Mapping[int, Sequence[float]]
    waits: Mapping[int, Sequence[float]]
    messages: Mapping[tuple[str, int, int], float]

    @property
    def seconds(self) -> float:
        """Seconds from the first start to the last end."""
        return max(chain.from_iterable(self.ends.values()), default=0.0)

    @property
    def busy(self) -> float:
        """Seconds of computation, summed over the ranks."""
        return sum(sum(self.ends[rank]) - sum(self.starts[rank]) for rank in self.order)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time without computation."""
        return max(0.0, 1 - self.busy / (len(self.order) * self.seconds)) if self.seconds else 0.0  # it may round to -0.0

    def timeline(self, dp: int = 0, tp: int = 0) -> list[dict[str, Any]]:
        """Return all actions and messages in the format of ``engine.timeline``.

        A send is its start alone. A receive lasts from the time at which its rank waits for it, or at which the message
        leaves, to the use of the value.
        """
        found = []
        for rank, row in self.order.items():
            place = {"rank": rank, "dp": dp, "tp": tp}
            times = zip(row, self.starts[rank], self.ends[rank], self.waits[rank], strict=True)
            for (kind, stage, microbatch), start, end, posted in times:
                forward, away = kind == "F", -1 if kind == "F" else 1
                name = "F" if forward else "B"
                if kind != "W" and (sent := self.messages.get((f"SEND_{name}", stage + away, microbatch))) is not None:
                    arrival = {"start": min(start, max(sent, posted)), "end": start}
                    found.append({**place, "stage": stage, "kind": f"RECV_{name}", "microbatch": microbatch, **arrival})
                found.append({**place, "stage": stage, "kind": kind, "microbatch": microbatch, "start": start, "end": end})
                if kind != "W" and (sent := self.messages.get((f"SEND_{name}", stage, microbatch))) is not None:
                    departure = {"start": sent, "end": sent}
                    found.append({**place, "stage": stage, "kind": f"SEND_{name}", "microbatch": microbatch, **departure})
        return found


def run_pipeline(
    order: Order,
    seconds: Mapping[tuple[int, str], float],
    message_seconds: Mapping[tuple[int, int], float] | None = None,
    mode: MessageMode = "overlapped",
) -> PipelineRun:
    """Play the actions of all ranks of one pipeline.

    Args:
        order: Actions of each rank.
        seconds: Seconds of each action by stage and kind.
        message_seconds: Seconds of each message by sending and receiving stage; missing ones take no time.
        mode: How messages are sent.

    Raises:
        ValueError: ranks wait for each other for ever.
        KeyError: an action has no seconds.
    """
    return _Players(order, seconds, message_seconds or {}, mode).run()


class _Players:
    """One generator per rank, which stops where it waits for another rank.

    Tensors between stages are numbered: ``stage * microbatches + microbatch`` for the output of a stage, and behind these
    numbers in the same order the gradients of its inputs. A generator yields the number of the tensor it waits for, or its
    complement if it waits for the end of its own transfer.
    """

    def __init__(
        self,
        order: Order,
        seconds: Mapping[tuple[int, str], float],
        message_seconds: Mapping[tuple[int, int], float],
        mode: MessageMode,
    ) -> None:
        self._order = order
        self._seconds = seconds
        self._mode = mode
        rank_of = {stage: rank for rank, row in order.items() for stage in {action.stage for action in row}}
        self._stages = 1 + max(rank_of, default=-1)
        self._microbatches = 1 + max((action.microbatch for row in order.values() for action in row), default=-1)
        count = 2 * self._stages * self._microbatches
        self._ready = [-1.0] * count
        self._arrived = [-1.0] * count
        self._links: dict[tuple[int, int], float] = defaultdict(float)
        self._blocked: dict[int, int] = {}
        self._woken: list[int] = []
        # seconds of the message that leaves a stage forwards and backwards; None within a rank and beyond the ends
        self._out: list[tuple[float | None, float | None]] = []
        for stage in range(self._stages):
            peers = [
                other if rank_of.get(other) not in (None, rank_of.get(stage)) else None for other in (stage + 1, stage - 1)
            ]
            forward, backward = (None if other is None else message_seconds.get((stage, other), 0.0) for other in peers)
            self._out.append((forward, backward))
        self._starts: dict[int, list[float]] = {rank: [] for rank in order}
        self._ends: dict[int, list[float]] = {rank: [] for rank in order}
        self._waits: dict[int, list[float]] = {rank: [] for rank in order}
        self._messages: dict[tuple[str, int, int], float] = {}
        self._rank_of = rank_of

    def run(self) -> PipelineRun:
        players = {rank: self._play(rank) for rank in self._order}
        running = [*reversed(players)]
        while running:
            rank = running.pop()
            awaited = next(players[rank], None)
            if awaited is None:
                del players[rank]
            else:
                self._blocked[awaited] = rank
            running += self._woken
            self._woken.clear()
        if players:
            stuck = ", ".join(map(str, sorted(players)))
            raise ValueError(f"ranks {stuck} wait for each other for ever; give the actions of all ranks in an order that ends")
        return PipelineRun(self._order, self._starts, self._ends, self._waits, self._messages)

    def _play(self, rank: int) -> Iterator[int]:
        starts, ends, waits = self._starts[rank], self._ends[rank], self._waits[rank]
        ready, arrived, seconds, on_demand = self._ready, self._arrived, self._seconds, self._mode != "overlapped"
        blocking, size, offset = self._mode == "blocking", self._microbatches, self._stages * self._microbatches
        free, sending = 0.0, -1  # the tensor whose send this rank has not waited for
        for kind, stage, microbatch in self._order[rank]:
            start, forward = free, kind == "F"
            source = self._source(kind, stage, microbatch)
            if source >= 0:
                if ready[source] < 0:
                    yield source
                if on_demand and arrived[source] < 0:
                    self._transfer(source, max(free, ready[source]))
                start = max(start, arrived[source])
            if sending >= 0 and kind != "W" and (sending < offset) != forward:
                if arrived[sending] < 0:
                    yield ~sending
                start, sending = max(start, arrived[sending]), -1
            end = start + seconds[stage, kind]
            starts.append(start)
            ends.append(end)
            waits.append(free)
            free = end
            if kind == "W":
                continue
            if sending >= 0:
                if arrived[sending] < 0:
                    yield ~sending
                free, sending = max(free, arrived[sending]), -1
            made = stage * size + microbatch + (0 if forward else offset)
            if self._leave(made, kind, stage, microbatch, free) and blocking:
                sending = made

    def _source(self, kind: str, stage: int, microbatch: int) -> int:
        """Return the number of the tensor that an action reads, or -1."""
        if kind == "F":
            return (stage - 1) * self._microbatches + microbatch if stage else -1
        if kind == "W" or stage == self._stages - 1:
            return -1
        return (self._stages + stage + 1) * self._microbatches + microbatch

    def _leave(self, made: int, kind: str, stage: int, microbatch: int, now: float) -> bool:
        """Make a tensor ready; return True if it goes to another rank."""
        self._ready[made] = now
        lasts = self._out[stage][kind != "F"]
        if lasts is None:
            self._arrived[made] = now
        else:
            self._messages["SEND_F" if kind == "F" else "SEND_B", stage, microbatch] = now
            if self._mode == "overlapped":
                link = self._rank_of[stage], self._rank_of[stage + 1 if kind == "F" else stage - 1]
                self._links[link] = self._arrived[made] = max(now, self._links[link]) + lasts
        if (waiting := self._blocked.pop(made, None)) is not None:
            self._woken.append(waiting)
        return lasts is not None

    def _transfer(self, tensor: int, begin: float) -> None:
        """Transfer a tensor for which its receiver waits."""
        gradient, place = divmod(tensor, self._stages * self._microbatches)
        self._arrived[tensor] = begin + (self._out[place // self._microbatches][gradient] or 0.0)
        if (waiting := self._blocked.pop(~tensor, None)) is not None:
            self._woken.append(waiting)
