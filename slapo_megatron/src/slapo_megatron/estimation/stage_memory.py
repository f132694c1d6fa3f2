"""Tensors that Megatron keeps for one stage: gradient buffers, flat weights, fp32 main copies and optimizer state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slapo_training import OptimizerFactory, StageMemory, flatten_parameters, initialized_optimizer

from ..configuration.options import MegatronOptions
from .gradient_buffers import BufferLayout, bucket_size, buffer_layouts


class MegatronStageMemory(StageMemory):
    """Memory of ``DistributedDataParallel`` and of the optimizer around a stage, for the replica that steps most.

    Args:
        module: The stage, with fake tensors.
        options: Options of the dialect.
        optimizer: Makes the optimizer.
        replicas: Global ranks of the replicas.
        may_split: True for the first stage of the first rank along ``pp``, whose buffers may have several buckets.
        is_joined: True for stages behind the first of a rank, whose buckets Megatron reduces in one call.
        tied: Names of parameters that other ranks along ``pp`` hold too.
    """

    repeats_blocks = True

    def __init__(
        self,
        module: nn.Module,
        options: MegatronOptions,
        optimizer: OptimizerFactory,
        replicas: Sequence[int],
        may_split: bool,
        is_joined: bool = False,
        tied: Collection[str] = (),
    ) -> None:
        super().__init__(replicas)
        number = len(replicas)
        self._is_sharded = options.distributed_optimizer
        settings = options.section("ddp")
        self._overlaps = bool(settings.get("overlap_grad_reduce"))
        size = bucket_size(settings, number, may_split)
        trained = [each for each in module.parameters() if each.requires_grad]
        self._buffers: list[torch.Tensor] = []
        self._main_grads: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors that the optimizer steps, each with its range of a gradient buffer."""
        self._buckets: list[tuple[int, torch.dtype, torch.dtype]] = []
        """Elements of each bucket or of those that are reduced together, with the types of its gradients and of its weights."""
        stepped: dict[int, nn.Parameter] = {}
        shared = {id(each) for name, each in module.named_parameters(remove_duplicate=False) if name in tied}
        layouts = buffer_layouts(trained, number, self._is_sharded, settings, size, shared)
        loads = [sum(some) for some in zip(*(layout.stepped_elements(number) for *_, layout in layouts), strict=True)]
        replica = loads.index(max(loads)) if loads else 0
        for group, dtype, layout in layouts:
            gradients = group[0].new_empty(layout.numel, dtype=dtype)
            self._buffers.append(gradients)
            numbers = [each.stop - each.start for each in layout.buckets]
            self._buckets += [(each, dtype, group[0].dtype) for each in ([sum(numbers)] if is_joined else numbers)]
            weights = self._flatten(module, group, layout) if self._is_sharded else {id(each): each for each in group}
            for old in group:
                parameter, start = weights[id(old)], layout.starts[id(old)]
                gradient = gradients.narrow(0, start, old.numel())
                _accumulate_into(parameter, gradient.view(old.shape))
                own = layout.local_range(old, replica, number) if self._is_sharded else (0, old.numel())
                if own[0] < own[1]:
                    stepped[id(old)] = main = self._main(parameter, own)
                    self._main_grads.append((main, gradient[slice(*own)].view(main.shape)))
        self._state = initialized_optimizer(optimizer, [stepped[id(each)] for each in trained if id(each) in stepped])

    def _flatten(self, module: nn.Module, group: Sequence[nn.Parameter], layout: BufferLayout) -> dict[int, nn.Parameter]:
        flat = group[0].new_empty(layout.numel)
        return flatten_parameters(module, flat, ((each, layout.starts[id(each)]) for each in group))

    def _main(self, parameter: nn.Parameter, own: tuple[int, int]) -> nn.Parameter:
        """Return the tensor that the optimizer steps for a range of a parameter: a view, or an fp32 copy."""
        if parameter.dtype is torch.float32:
            return nn.Parameter(parameter.detach().view(-1)[slice(*own)]) if self._is_sharded else parameter
        value = parameter.detach()
        return nn.Parameter((value.view(-1)[slice(*own)] if self._is_sharded else value).float())

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        self._put_gradients()  # they stay until the next step
        optimizer: list[Any] = [main for main, _ in self._main_grads]
        optimizer += [value for state in self._state.state.values() for value in state.values()]
        kept = [main.grad for main, _ in self._main_grads if main.grad is not None]
        return {"buckets": self._buffers, "gradients": kept, "optimizer": [each for each in optimizer if _is_tensor(each)]}

    def begin_step(self) -> None:
        for main, _ in self._main_grads:
            main.grad = None

    def end_backward(self, is_last: bool) -> None:
        kind = "reduce_scatter" if self._is_sharded else "all_reduce"
        for number, dtype, _ in self._buckets if is_last else ():
            self.communicate(kind, number * dtype.itemsize, overlapped=self._overlaps)

    def step(self) -> None:
        self._put_gradients()
        self._state.step()
        for number, _, dtype in self._buckets if self._is_sharded else ():
            self.communicate("all_gather", number * dtype.itemsize)

    def _put_gradients(self) -> None:
        for main, gradient in self._main_grads:
            main.grad = gradient.to(main.dtype)


def _accumulate_into(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    def add(each: torch.Tensor) -> None:
        if each.grad is not None:
            gradient.add_(each.grad)
        each.grad = None

    parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
