"""Memory of stage 3 of ZeRO: partitions of parameters and gradients, gathered parameters, and the reduction bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slapo_training import OptimizerFactory, StageMemory

from .flat_groups import flatten, state_tensors
from .gathered_linear import replaced_linear
from .parameter_gathers import ParameterGathers, partition_size
from .zero_settings import ZeroRanks, ZeroSettings


class GatheredMemory(StageMemory):
    """Memory of stage 3 of ZeRO around a model.

    Args:
        module: The model, with fake tensors.
        optimizer: Makes the optimizer.
        settings: Settings of ZeRO.
        ranks: Groups of ranks.
    """

    owns_parameters = records_order = True

    def __init__(self, module: nn.Module, optimizer: OptimizerFactory, settings: ZeroSettings, ranks: ZeroRanks) -> None:
        super().__init__(ranks.replicas)
        replicas = len(ranks.replicas)
        self._module, self._settings, self._ranks, self._replicas = module, settings, ranks, replicas
        self._trained = [each for each in module.parameters() if each.requires_grad]
        everything = [*module.parameters()]
        self._gathers = ParameterGathers(settings, replicas, everything, self._communicate_gather)
        like = self._trained[0]
        frozen = [each.new_empty(partition_size(each, replicas)) for each in everything if not each.requires_grad]
        sizes = [partition_size(each, replicas) for each in self._trained]
        self._partitions = [like.new_empty(sum(sizes)), *frozen]
        self._gradients = like.new_empty(sum(sizes))
        self._bucket = like.new_empty(settings.reduce_bucket) if settings.is_contiguous else None
        self._optimizer = optimizer([*self._trained])
        self._averages: list[list[torch.Tensor]] = []
        self._mains = [*self._main_groups(sizes)]
        self._optimizer.step()
        for main in self._mains:
            main.grad = None
        self._bucketed: list[nn.Parameter] = []
        self._elements = 0
        self._started: dict[int, nn.Module] = {}
        self._handles: list[RemovableHandle] = []
        self._gathers.gather_persistent()

    def _main_groups(self, sizes: Sequence[int]) -> Iterator[nn.Parameter]:
        """Put a flat fp32 tensor in the place of each group's parameters; return them, and note the gradients of each."""
        places, at = {}, 0
        for parameter, size in zip(self._trained, sizes, strict=True):
            places[id(parameter)] = self._gradients.narrow(0, at, size)
            at += size
        for options in self._optimizer.param_groups:
            gradients, mains = [places[id(each)] for each in options["params"]], []
            for part in self._sub_groups(gradients):
                self._averages.append(part)
                main = nn.Parameter(self._gradients.new_empty(sum(each.numel() for each in part), dtype=torch.float32))
                main.grad = torch.empty_like(main)
                mains.append(main)
                yield main
            options["params"] = mains

    def _sub_groups(self, gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        part: list[torch.Tensor] = []
        for gradient in gradients:
            part.append(gradient)
            if sum(each.numel() for each in part) >= self._settings.sub_group:
                yield part
                part = []
        if part:
            yield part

    def run_context(self) -> AbstractContextManager[None]:
        return replaced_linear() if self._settings.replaces_linear else nullcontext()

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        whole = [each for each in self._gathers.whole.values() if each is not None]
        buckets = [self._bucket] if self._bucket is not None else []
        optimizer = [*self._mains, *state_tensors(self._optimizer)]
        return {
            "parameters": [*self._partitions, *whole],
            "gradients": [self._gradients],
            "buckets": buckets,
            "optimizer": optimizer,
        }

    def end_recording(self) -> None:
        self._gathers.end_recording()

    def begin_step(self) -> None:
        add = self._handles.append
        for module in self._module.modules():
            add(module.register_forward_pre_hook(self._before_forward))
            add(module.register_forward_hook(self._after_forward))
        for parameter in self._trained:
            add(parameter.register_post_accumulate_grad_hook(self._receive))  # type: ignore[no-untyped-call]

    def _before_forward(self, module: nn.Module, args: Any) -> Any:
        if module is self._module:
            self._gathers.begin()
        self._gathers.fetch(module, True)
        waiting = _WaitingGather(lambda: self._end_backward_of(module))
        return waiting.watch(args)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._gathers.release(module, True)
        return _notify(output, _Once(lambda: self._begin_backward_of(module)))

    def _begin_backward_of(self, module: nn.Module) -> None:
        self._started[id(module)] = module
        with torch.no_grad():
            self._gathers.fetch(module, False)

    def _end_backward_of(self, module: nn.Module) -> None:
        self._started.pop(id(module), None)
        self._gathers.release(module, False)

    @torch.no_grad()
    def _receive(self, parameter: Any) -> None:
        size = self._settings.reduce_bucket
        if self._elements and self._elements + parameter.numel() > size:
            self._reduce()
        if self._bucket is not None and self._elements + parameter.numel() <= size:
            parameter.grad = self._bucket.narrow(0, self._elements, parameter.numel()).view(parameter.shape)
        self._bucketed.append(parameter)
        self._elements += parameter.numel()

    def _communicate_gather(self, nbytes: int, overlapped: bool) -> None:
        self.communicate("all_gather", nbytes, overlapped=overlapped)

    def _reduce(self) -> None:
        fits = self._bucket is not None and self._elements <= self._settings.reduce_bucket
        size, overlaps = self._gradients.element_size(), self._settings.overlaps
        if self._bucketed and (self._settings.reduces_scattered or not fits):
            sizes = [partition_size(each, self._replicas) * self._replicas for each in self._bucketed]
            self.communicate("reduce_scatter", size * sum(sizes), overlapped=overlaps)
            is_copied = len(sizes) > 1 or sizes[0] != self._bucketed[0].numel()
            flat = self._gradients.new_empty(sum(sizes) * is_copied)
            if flat.device.type == "cpu":
                flat.new_empty(sum(sizes))  # gloo reduces a copy of its input
        else:
            self.communicate("all_reduce", size * self._elements, overlapped=overlaps)
        for parameter in self._bucketed:
            parameter.grad = None
        self._bucketed.clear()
        self._elements = 0

    @torch.no_grad()
    def end_backward(self, is_last: bool) -> None:
        self._reduce()
        self._gathers.release_leftovers(self._started.values())
        self._started.clear()

    @torch.no_grad()
    def step(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._gathers.release_all()
        for gradients in self._averages:
            for gradient in gradients:
                gradient.double().norm()
            for ranks in self._ranks:
                self.communicate("all_reduce", 8, ranks)
        for ranks in self._ranks if self._settings.checks_overflow else ():
            self.communicate("all_reduce", 1, ranks)
        params = {id(group): group["params"] for group in self._optimizer.param_groups}
        for main, gradients in zip(self._mains, self._averages, strict=True):
            flat = flatten(gradients)
            main.grad = flat.to(torch.float32)
            del flat
            for group in self._optimizer.param_groups:
                group["params"] = [main] if any(each is main for each in params[id(group)]) else []
            self._optimizer.step()
            main.grad = None
        self._gathers.gather_persistent()


class _Once:
    """Call that happens at the first of several notes in one backward."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class _WaitingGather:
    """Call that happens when all tensors that it watches have their gradients."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._left = call, 0

    def watch(self, args: Any) -> Any:
        return _notify(args, self, self)

    def add(self) -> None:
        self._left += 1

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            self._call()


class _Notify(torch.autograd.Function):
    """Autograd node whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return gradient, None


def _notify(value: Any, call: Callable[[], None], waiting: _WaitingGather | None = None) -> Any:
    """Return nested tensors, each with a node that calls a function in the backward."""
    if isinstance(value, torch.Tensor):
        if not (value.requires_grad and torch.is_grad_enabled()):
            return value
        if waiting is not None:
            waiting.add()
        return _Notify.apply(value, call)  # type: ignore[no-untyped-call]
    if type(value) in (list, tuple):
        return type(value)(_notify(each, call, waiting) for each in value)
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = _notify(each, call, waiting)
    return value
