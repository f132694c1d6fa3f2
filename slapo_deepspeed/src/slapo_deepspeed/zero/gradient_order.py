"""Check that replicas and micro-batches use the same parameters: ZeRO reduces gradients in the order of the backward."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from slapo_core import BuildError, Program
from slapo_training.distributed import all_reduce

_NOTHING = -(2**40)


class UsedParameters:
    """Recorder of the order in which a step computes gradients; stage 0 of ZeRO records nothing.

    Stages 1 and 2 of ZeRO put gradients into buckets in the order of the backward and reduce the buckets over the replicas,
    so all replicas need the same order. Stage 3 loses the gradients of parameters that only some micro-batches of a step
    use.
    """

    def __init__(self, program: Program, parameters: Mapping[str, nn.Parameter], zero_stage: int) -> None:
        self._program, self._zero_stage = program, zero_stage
        self._order, self._used = 0, set[int]()
        self._first: set[int] | None = None
        self._differs = False
        self._compares = zero_stage in (1, 2) and program.axis_size("dp") > 1
        self._handles: list[RemovableHandle] = []
        self._names = [*parameters]
        if zero_stage:
            for index, parameter in enumerate(parameters.values()):
                if parameter.requires_grad:
                    self._handles.append(parameter.register_hook(self._order_hook(index)))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _order_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        word = index.to_bytes(4, "little")

        def note(gradient: torch.Tensor) -> None:
            self._order = zlib.crc32(word, self._order)
            self._used.add(index)

        return note

    def check_new(self) -> None:
        """Refuse gradients that were computed since the last step.

        Raises:
            BuildError: there are some; ZeRO has taken them and would step with them.
        """
        if self._used:
            name = self._names[min(self._used)]
            raise BuildError(
                f"{name!r} got a gradient outside of train_batch, as in another engine's backward, and ZeRO has taken it; "
                "freeze the parameters meanwhile (requires_grad_(False)), or use stage 0 or target='torch'"
            )

    def end_micro_batch(self) -> None:
        """Compare the parameters that this micro-batch used with the first one's; call it after each backward."""
        if self._zero_stage == 3:
            self._differs |= self._first is not None and self._used != self._first
            self._first, self._used = self._first if self._first is not None else self._used, set()

    def check(self) -> None:
        """Compare the replicas, and reset the record. Collective with ZeRO; call it after the last micro-batch's backward.

        Raises:
            BuildError: on every rank: replicas or micro-batches differ, and the gradients may be wrong.
        """
        order, differs = self._order, self._differs
        self._order, self._differs, self._first = 0, False, None
        self._used.clear()
        mesh = self._program.mesh
        if not self._compares and self._zero_stage != 3:
            return
        slots = [_NOTHING] * (2 * self._program.axis_size("pp") * self._program.axis_size("tp"))
        own = 2 * (self._program.axis_rank("pp") * self._program.axis_size("tp") + self._program.axis_rank("tp"))
        slots[own : own + 2] = order, -order
        row = torch.tensor([int(differs), *slots], device=mesh.device_type if mesh is not None else "cpu")
        some, *found = all_reduce(row, mesh, dist.ReduceOp.MAX).tolist()
        if some:
            raise BuildError(
                "micro-batches of one step use different parameters, whose gradients stage 3 of ZeRO would lose; use stage 0 "
                "to 2, or microbatches=1"
            )
        if self._compares and any(high != -low for high, low in zip(found[::2], found[1::2], strict=True)):
            raise BuildError(
                f"replicas use different parameters, or in another order, and stage {self._zero_stage} of ZeRO would add up "
                "gradients of one to those of another; use stage 0, or target='torch' or 'megatron'"
            )
