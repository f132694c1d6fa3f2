"""Tensors between interleaved stages that exist at a time, as Megatron's schedule keeps them in variables and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from slapo_training import MessageSizes, PipelineAction

Key = tuple[str, int, int]
"""Kind of a tensor, ``"input"``, ``"output"`` or the gradient of one; stage; micro-batch."""


class InterleavedSchedule(NamedTuple):
    """Facts about the interleaved schedule of one rank.

    Args:
        warmup: Number of forwards before forwards and backwards go by turns.
        input_slots: Number of buffers of received inputs.
        gradient_slots: Number of buffers of received gradients.
        is_flushed: True with ``overlap_p2p_comm_warmup_flush``.
        is_first: True for the first rank along ``pp``.
        is_last: True for the last rank along ``pp``.
    """

    warmup: int
    input_slots: int = 1
    gradient_slots: int = 1
    is_flushed: bool = False
    is_first: bool = False
    is_last: bool = False

    def bytes_during(self, order: Sequence[PipelineAction], sizes: Mapping[int, MessageSizes]) -> list[int]:
        """Return the bytes of messages that exist beside activations during each action.

        A received input exists until its backward, an output is an activation until its own. Variables of the schedule hold
        some longer: a tensor's graph holds the input of its stage, and that its gradient.

        Args:
            order: Actions of the rank.
            sizes: Bytes of the messages of its stages.
        """
        return [*_Messages(self, order, sizes).run()]


class _Messages:
    def __init__(
        self, schedule: InterleavedSchedule, order: Sequence[PipelineAction], sizes: Mapping[int, MessageSizes]
    ) -> None:
        self._schedule, self._order, self._sizes = schedule, order, sizes
        self._forwards = [each for each in order if each.kind == "F"]
        self._backwards = [each for each in order if each.kind == "B"]
        self._waiting: set[Key] = set()
        """Received tensors whose backward has not ended."""
        self._variables: dict[str, Key | None] = {}
        self._done: set[tuple[int, int]] = set()

    def run(self) -> Iterator[int]:
        num_steady = len(self._forwards) - self._schedule.warmup
        numbers = {"F": 0, "B": 0}
        self._receive("input", 0)
        for action in self._order:
            number = numbers[action.kind]
            numbers[action.kind] += 1
            self._receive_ahead(action, number, num_steady)
            yield self._total()
            if action.kind == "F":
                self._end_forward(action, number)
            else:
                self._end_backward(action, number, number < num_steady)

    def _receive_ahead(self, action: PipelineAction, number: int, num_steady: int) -> None:
        schedule = self._schedule
        if not schedule.is_flushed:
            return
        if action.kind == "F" and number < schedule.warmup and not schedule.is_first:
            self._receive("input", number + 1)
        if action.kind == "B" and number >= num_steady and not schedule.is_last:
            self._receive("output gradient", number + 1)

    def _end_forward(self, action: PipelineAction, number: int) -> None:
        warmup = self._schedule.warmup
        is_sent = bool(self._sizes[action.stage].sent)
        self._variables["output"] = ("output", action.stage, action.microbatch) if is_sent else None
        received = self._receive("input", number + 1)
        if number < warmup and not self._schedule.is_flushed:
            self._variables["warm-up input"] = received
        else:
            if number + 1 == warmup and self._sizes[action.stage].received:  # the finished receive holds its tensor
                self._variables["warm-up input"] = ("input", action.stage, action.microbatch)
            self._keep_in_slot("input", number, self._schedule.input_slots, received)
        if number + 1 == min(warmup, len(self._forwards)):
            slot = self._schedule.gradient_slots - 1
            self._variables[f"gradient {slot}"] = self._receive("output gradient", 0)

    def _end_backward(self, action: PipelineAction, number: int, is_steady: bool) -> None:
        place = action.stage, action.microbatch
        self._done.add(place)
        self._waiting -= {("input", *place), ("output gradient", *place)}
        own: Key | None = ("input gradient", *place) if self._sizes[action.stage].sent_back else None
        self._variables["input gradient"] = own
        received = self._receive("output gradient", number + 1)
        if is_steady or self._schedule.is_flushed:
            self._variables["send"] = own
            self._keep_in_slot("gradient", number, self._schedule.gradient_slots, received)
        else:
            self._variables["output gradient"] = received

    def _keep_in_slot(self, kind: str, number: int, slots: int, key: Key | None) -> None:
        self._variables[f"{kind} {number % slots}"] = key
        if key is not None and slots > 1:
            self._variables[f"{kind} {(number + 1) % slots}"] = None

    def _receive(self, kind: str, number: int) -> Key | None:
        """Receive the input of a forward, or the gradient of a backward's output; return None if it has none."""
        actions = self._forwards if kind == "input" else self._backwards
        if number >= len(actions):
            return None
        _, stage, microbatch = actions[number]
        key: Key = (kind, stage, microbatch)
        if not self._bytes(key):
            return None
        self._waiting.add(key)
        return key

    def _total(self) -> int:
        held = self._waiting | {key for key in self._variables.values() if key is not None}
        for kind, *place in [*held]:
            if (place[0], place[1]) in self._done:
                if kind == "output":
                    held.add(("input", place[0], place[1]))
                if kind in ("output", "input"):
                    held.add(("input gradient", place[0], place[1]))
            elif kind == "output":
                held.discard(("output", place[0], place[1]))
        return sum(map(self._bytes, held))

    def _bytes(self, key: Key) -> int:
        received, sent, sent_back = self._sizes[key[1]]
        return {"input": received, "output": sent, "output gradient": sent, "input gradient": sent_back}[key[0]]
