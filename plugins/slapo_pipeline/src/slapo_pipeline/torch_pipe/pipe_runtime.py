"""The stages of a ``Pipe`` as torch's schedules run them; importing this takes a second."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from slapo_core import BuildError, Program, forward_signature, named_inputs
from slapo_tracing.nodes import difference, fingerprint
from slapo_training import ExactStage

from .stage_runtime import StageRunner, mark_local_stage, meta_like, model_result, sendable, sum_tied_gradients


class PipeRuntime:
    """State that the stages of one pipe on this rank share."""

    def __init__(self, program: Program, example: Mapping[str, Any]) -> None:
        self.program, self.example = program, example
        named = dict(program.module.named_parameters(remove_duplicate=False))
        self.tied = {id(named[name]): named[name] for tie in program.ties for name in tie.names if name in named}
        self._group: dist.ProcessGroup | None = None
        self._built: dict[int, TiedStage] = {}
        self._finished: set[int] = set()

    def stage(
        self, index: int, device: torch.device, group: dist.ProcessGroup | None, output: Callable[[Any], Any] | None
    ) -> ExactStage:
        """Make the stage that torch's schedules run."""
        mark_local_stage(self.program, index)
        module = BatchForwardingStage(self.program, index, self.example, output)
        if not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
            module.to(device)
        received, sent = module.received_like(), module.sent_like()
        stage = TiedStage(module, index, len(self.program.stages), device, received, sent, group=group)
        stage.runtime = self
        self._built[index], self._group = stage, group
        return stage

    def finish(self, stage: TiedStage, factor: int) -> None:
        """Note the end of a stage's step; when all stages of this rank have ended, sum the gradients of ties."""
        self._finished.add(stage.stage_index)
        if not self.tied or self._finished < self._built.keys():
            return
        self._finished.clear()
        held = {id(parameter) for built in self._built.values() for parameter in built.submod.parameters()}
        for key, parameter in self.tied.items():
            if parameter.grad is not None and key in held and factor != 1:
                parameter.grad.div_(factor)
        sum_tied_gradients(self.program, self._group)


class TiedStage(ExactStage):
    """A stage that leaves the gradients of tied parameters to the runtime, as other stages of this rank may hold them."""

    runtime: PipeRuntime

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients of this stage's own parameters."""
        for parameter in self.submod.parameters():
            if grad_scale_factor != 1 and parameter.grad is not None and id(parameter) not in self.runtime.tied:
                parameter.grad.div_(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """End a step; the schedule calls this after the stage's last backward."""
        if self.has_backward:  # an evaluation must not scale the gradients of the last step again
            super().perform_reduce_grad(grad_scale_factor)
            self.runtime.finish(self, grad_scale_factor)


class BatchForwardingStage(StageRunner):
    """A stage that also passes on the batch arguments that later stages read.

    Its results are ``output`` of the model's result, or for None all tensors in it.
    """

    takes_nested = True

    def __init__(self, program: Program, index: int, example: Mapping[str, Any], output: Callable[[Any], Any] | None) -> None:
        stage, last = program.stages[index], index + 1 == len(program.stages)
        super().__init__(stage.module, last, output)
        self.__dict__["_model"] = program.module  # no child
        self._is_first, self._inputs, self._batch_inputs, self._example = index == 0, stage.inputs, stage.batch_inputs, example
        self._outputs = () if last else program.stages[index + 1].inputs
        self._forwarded_in = () if self._is_first else _forwarded_arguments(program, index, example)
        self._forwarded_out = () if last else _forwarded_arguments(program, index + 1, example)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first:
            received: tuple[torch.Tensor, ...] = ()
            batch = self._check_batch(named_inputs(self.__dict__["_model"], args, kwargs))
        else:
            received = args[: len(self._inputs)]
            batch = {**self._unpack_batch(args[len(self._inputs) :]), **kwargs}
        forwarded = [tensor for name in self._forwarded_out for tensor in _tensors(batch[name])]
        result = super().forward(*received, **{name: batch[name] for name in self._batch_inputs})
        return result if self._last else (*result, *map(sendable, forwarded))

    def received_like(self) -> tuple[torch.Tensor, ...]:
        return (*map(meta_like, self._inputs), *self._forwarded_like(self._forwarded_in))

    def sent_like(self) -> tuple[torch.Tensor, ...]:
        if self._last:
            return tuple(map(meta_like, self.results(model_result(self.module))))
        return (*map(meta_like, self._outputs), *self._forwarded_like(self._forwarded_out))

    def _forwarded_like(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        return [tensor for name in names for tensor in _tensors(self._example[name])]

    def _check_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Refuse a micro-batch unlike the one that the pipe was made with: later stages are made for its shapes."""
        parameters = forward_signature(self.__dict__["_model"]).parameters
        for name in {**self._example, **batch}:
            default = parameters[name].default if name in parameters else None
            default = None if default is inspect.Parameter.empty else default
            given, made = (fingerprint(values.get(name, default)) for values in (batch, self._example))
            if given != made:
                raise BuildError(f"{difference(made, given, name)}; make a pipe with inputs like these, or give others to step")
        return batch

    def _unpack_batch(self, tensors: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        """Return the forwarded arguments, in their structures."""
        left, batch = iter(tensors), dict(self._example)
        for name in self._forwarded_in:
            batch[name] = pytree.tree_map_only(torch.Tensor, lambda _: next(left), self._example[name])
        return {name: batch[name] for name in (*self._forwarded_in, *self._batch_inputs) if name in batch}


def _forwarded_arguments(program: Program, index: int, example: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the model's arguments with tensors that this stage or a later one reads."""
    read = dict.fromkeys(name for stage in program.stages[index:] for name in stage.batch_inputs)
    return tuple(sorted(name for name in read if name in example and _tensors(example[name])))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
