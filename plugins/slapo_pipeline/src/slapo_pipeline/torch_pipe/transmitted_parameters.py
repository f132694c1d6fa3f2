"""Transmitted parameters: tied parameters that the first stage keeps and sends to the other stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from slapo_core import Boundary, Program, Stage, TieGroup
from slapo_tracing.nodes import MODULE_TABLES, shallow_copy


def transmit_parameters(program: Program, is_chosen: Callable[[TieGroup], bool]) -> Program:
    """Return a program in which the first stage of a tie sends the parameter's value on and gets its whole gradient.

    Args:
        program: Program with ties.
        is_chosen: Whether a tie is transmitted; the others stay ties.
    """
    chosen = [tie for tie in program.ties if is_chosen(tie)]
    if not chosen:
        return program
    values = [_value(program, tie) for tie in chosen]
    stages = tuple(_stage(program, stage, chosen, values) for stage in program.stages)
    known: dict[int, tuple[Program, Program]] = {}

    def replan(training: bool, batch: Mapping[str, Any]) -> Program:
        assert program.replan is not None
        now = program.replan(training, batch)
        if now is program:
            return made
        if id(now) not in known:
            if len(known) >= _MAX_PROGRAMS:
                known.clear()
            known[id(now)] = (now, transmit_parameters(now, is_chosen))
        return known[id(now)][1]

    left = tuple(tie for tie in program.ties if tie not in chosen)
    made = dataclasses.replace(program, stages=stages, ties=left, replan=replan if program.replan is not None else None)
    return made


_MAX_PROGRAMS = 16


def _value(program: Program, tie: TieGroup) -> Boundary:
    parameter = program.module.get_parameter(tie.names[0])
    name = tie.names[0].replace(".", "_")
    return Boundary(name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)


def _stage(program: Program, stage: Stage, ties: Sequence[TieGroup], values: Sequence[Boundary]) -> Stage:
    index, last = stage.index, len(program.stages) - 1
    received = [k for k, tie in enumerate(ties) if tie.stages[0] < index <= tie.stages[-1]]
    sent = [k for k, tie in enumerate(ties) if tie.stages[0] <= index < tie.stages[-1]]
    if not received and not sent:
        return stage
    own = dict(stage.module.named_parameters(remove_duplicate=False))
    used = {k: [name for name in ties[k].names if name in own] for k in received if index in ties[k].stages}
    module = TransmittingStage(stage.module, len(stage.inputs), received, sent, used, is_last=index == last)
    for k in sent:
        if ties[k].stages[0] == index:
            module.kept[k] = next(name for name in ties[k].names if name in own)
    return dataclasses.replace(stage, module=module, inputs=(*stage.inputs, *(values[k] for k in received)))


class TransmittingStage(nn.Module):
    """A stage that receives values of parameters after its own inputs, and sends values of parameters after its own results.

    Args:
        received: Numbers of the parameters that it receives, in order.
        used: Number of a received parameter to its names in the stage, which no longer holds it.
    """

    def __init__(
        self,
        module: nn.Module,
        num_inputs: int,
        received: Sequence[int],
        sent: Sequence[int],
        used: Mapping[int, Sequence[str]],
        *,
        is_last: bool,
    ) -> None:
        super().__init__()
        inner = _with_meta_parameters(module, [name for names in used.values() for name in names])
        for table in MODULE_TABLES:
            self.__dict__[table] = inner.__dict__[table]
        self.__dict__["inner"] = inner  # no child: its parameters are this module's, under their names
        self.kept: dict[int, str] = {}
        """Number of each parameter that this stage keeps for later stages to the parameter's name."""
        self._num_inputs, self._received, self._sent, self._used = num_inputs, received, sent, used
        self._is_last = is_last
        self.training = module.training

    def forward(self, *values: torch.Tensor, **batch: Any) -> Any:
        """Run the stage with the received values in the place of its parameters."""
        parameters = dict(zip(self._received, values[self._num_inputs :], strict=True))
        given = {name: parameters[k] for k, names in self._used.items() for name in names}
        inner = self.__dict__["inner"]
        inner.training = self.training
        result = functional_call(inner, given, values[: self._num_inputs], batch, tie_weights=False)
        if self._is_last:
            return result
        # a copy: a stage's result must not be the leaf whose ``grad`` accumulates
        own = {k: self.get_parameter(name).clone() for k, name in self.kept.items()}
        return (*result, *({**parameters, **own}[k] for k in self._sent))


def _with_meta_parameters(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """Copy the module tree around some parameters, with meta buffers in their places."""
    copies: dict[int, nn.Module] = {}
    top = _copy_once(module, copies)
    for name in names:
        *outer, last = name.split(".")
        holder = top
        for each in outer:
            holder._modules[each] = holder = _copy_once(holder._modules[each], copies)
        parameter = holder._parameters.pop(last)
        if parameter is not None:
            holder.register_buffer(last, torch.empty_like(parameter, device="meta"), persistent=False)
    return top


def _copy_once(module: nn.Module | None, copies: dict[int, nn.Module]) -> nn.Module:
    assert module is not None
    if id(module) not in copies:
        copied = shallow_copy(module)
        copies[id(module)] = copies[id(copied)] = copied
    return copies[id(module)]
