"""Memory of stages 1 and 2 of ZeRO: flat parameters, gradient buckets, and this replica's fp32 range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from slapo_training import OptimizerFactory, StageMemory

from .flat_groups import FlatGroup, bucket_sizes, flatten, state_tensors
from .zero_settings import ZeroRanks, ZeroSettings


class PartitionedMemory(StageMemory):
    """Memory of stage 1 or 2 of ZeRO around one stage of the program.

    Args:
        module: The stage, with fake tensors.
        optimizer: Makes the optimizer.
        settings: Settings of ZeRO.
        ranks: Groups of ranks.
        is_pipeline: True if DeepSpeed's pipeline runs the stage.
        replica: The replica; None for the one that keeps most gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerFactory,
        settings: ZeroSettings,
        ranks: ZeroRanks,
        is_pipeline: bool,
        replica: int | None = None,
    ) -> None:
        super().__init__(ranks.replicas)
        self._model_parallel = ranks.model_parallel
        self.repeats_blocks = settings.stage == 1 and not settings.overlaps
        self._settings, self._is_pipeline = settings, is_pipeline
        self._optimizer = optimizer([each for each in module.parameters() if each.requires_grad])
        self._groups: list[FlatGroup] = []
        self._group_of: dict[int, FlatGroup] = {}
        for options in self._optimizer.param_groups:
            group = FlatGroup(module, options["params"], len(ranks.replicas), replica)
            options["params"] = [group.main]
            group.main.grad = torch.empty_like(group.main)
            self._groups.append(group)
            for parameter in group.parameters:
                self._group_of[id(parameter)] = group
                parameter.register_post_accumulate_grad_hook(self._receive)  # type: ignore[no-untyped-call]
        self._optimizer.step()
        for group in self._groups:
            group.main.grad = None
        self._buckets: list[torch.Tensor] = []
        self._bucketed: list[nn.Parameter] = []
        self._elements, self._is_last = 0, False
        self._own_gradients: torch.Tensor | None = None
        self._own_elements = 0
        self._sums: list[list[torch.Tensor] | None] = [None] * len(self._groups)
        self._averages: list[list[torch.Tensor]] = []

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        main = [group.main for group in self._groups]
        return {"optimizer": [*main, *state_tensors(self._optimizer)]}

    def begin_backward(self, is_last: bool) -> None:
        self._is_last = is_last

    @torch.no_grad()
    def _receive(self, parameter: Any) -> None:
        """Handle a gradient that the backward has accumulated."""
        if self._settings.is_contiguous and not self._buckets:
            self._allocate(1 + self._settings.overlaps)
        if self._settings.stage == 2 or (self._settings.overlaps and self._is_last):
            self._add(parameter)

    def _allocate(self, number: int) -> None:
        like = self._groups[0].flat
        self._buckets += [like.new_empty(self._settings.reduce_bucket) for _ in range(number)]

    @torch.no_grad()
    def end_backward(self, is_last: bool) -> None:
        if self._settings.stage == 1:
            if not is_last:
                return
            if self._is_pipeline and self._settings.is_contiguous:
                self._allocate(1)
            for group in self._groups if not self._settings.overlaps else ():
                for parameter in group.parameters:
                    if parameter.grad is not None:
                        self._add(parameter)
        self._reduce()
        self._accumulate(is_last)
        self._buckets.clear()
        self._own_gradients, self._own_elements = None, 0
        for group in self._groups:
            for parameter in group.parameters:
                parameter.grad = None

    def _add(self, parameter: nn.Parameter) -> None:
        """Put a gradient into the bucket, and reduce the bucket before if it is full."""
        if self._elements + parameter.numel() > self._settings.reduce_bucket:
            self._reduce()
            if self._settings.is_contiguous and self._settings.overlaps:
                self._buckets.reverse()
        if self._settings.is_contiguous and parameter.numel() <= self._settings.reduce_bucket:
            parameter.grad = self._buckets[0].narrow(0, self._elements, parameter.numel()).view(parameter.shape)
        self._elements += parameter.numel()
        self._bucketed.append(parameter)

    def _reduce(self) -> None:
        gradients = [each.grad for each in self._bucketed if each.grad is not None]
        parts = [part for each in self._bucketed for part in self._group_of[id(each)].parts(each)]
        num_replicas = len({replica for replica, _ in parts})
        is_copied = not self._settings.is_contiguous or (self._settings.reduces_scattered and num_replicas > 1)
        if gradients and is_copied:
            torch.cat([each.view(-1) for each in gradients])
        self._communicate_bucket(parts)
        for parameter in self._bucketed:
            if self._group_of[id(parameter)].is_own(parameter):
                if self._settings.is_contiguous:
                    self._keep(parameter)
            elif self._settings.stage == 2:
                parameter.grad = None
        self._bucketed.clear()
        self._elements = 0

    def _communicate_bucket(self, parts: Sequence[tuple[int, int]]) -> None:
        """Note the reductions of the bucket, given the replicas that step its elements."""
        settings, size = self._settings, self._groups[0].flat.element_size()
        if not (settings.is_contiguous and settings.reduces_scattered):
            self.communicate("all_reduce", size * self._elements, overlapped=settings.overlaps)
            return
        merged = [(replica, sum(number for _, number in some)) for replica, some in groupby(parts, itemgetter(0))]
        by_replica: dict[int, list[int]] = {}
        for replica, number in merged:
            by_replica.setdefault(0 if settings.reduces_to_all else replica, []).append(number)
        for numbers in by_replica.values():
            for number in bucket_sizes(numbers, settings.reduce_bucket):
                kind = "all_reduce" if settings.reduces_to_all else "reduce"
                self.communicate(kind, size * number, overlapped=settings.overlaps)

    def _keep(self, parameter: nn.Parameter) -> None:
        """Move the reduced gradient of a parameter that this replica steps out of the bucket."""
        if self._own_gradients is None:
            total = sum(each.numel() for group in self._groups for each in group.own)
            self._own_gradients = self._groups[0].flat.new_empty(total)
        parameter.grad = self._own_gradients.narrow(0, self._own_elements, parameter.numel()).view(parameter.shape)
        self._own_elements += parameter.numel()

    def _accumulate(self, is_last: bool) -> None:
        for index, group in enumerate(self._groups):
            found = [each.grad if each.grad is not None else torch.zeros_like(each) for each in group.own]
            sums = self._sums[index]
            if sums is None:
                sums = self._sums[index] = found
            if is_last:
                self._averages.append(group.own_range(sums))
                self._sums[index] = None

    @torch.no_grad()
    def step(self) -> None:
        self._communicate_norms()
        for average in self._averages:
            for gradient in average:
                torch.linalg.vector_norm(gradient.double())
        for group in self._groups:
            flat = flatten(self._averages.pop(0))
            group.main.grad = flat.to(torch.float32)
            del flat
        self._optimizer.step()
        for group in self._groups:
            group.main.grad = None
            self.communicate("all_gather", group.flat.nbytes)

    def _communicate_norms(self) -> None:
        for ranks in (self.replicas, self._model_parallel):
            if self._settings.checks_overflow:
                self.communicate("all_reduce", 1, ranks)
            for _ in self._groups if self._settings.computes_norm else ():
                self.communicate("all_reduce", 4, ranks)
