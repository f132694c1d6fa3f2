"""A partitioned model as one module: its children are the stages, and its graph calls them in turn."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import fx, nn

from slapo_core import Program, Stage, call_arguments, forward_signature, named_inputs
from slapo_tracing.graphs import TracedModule, input_check_of
from slapo_tracing.recording import HOOK_ATTRIBUTES

from .stage_module import StageGuard, with_strides


class StageArguments(NamedTuple):
    """Arguments, names and liveness of the stages of a partitioned module, in the order of its graph; equal on every rank.

    An item of a tuple is named ``node.0``, ``node.0.1``, …

    Args:
        stage_id_2_arg_names: Stage to the names of its arguments.
        stage_id_2_name: Stage to its name.
        liveness: Stage to the names of the tensors that must be alive when it starts: those that it or a later stage reads.
    """

    stage_id_2_arg_names: dict[int, list[str]]
    stage_id_2_name: dict[int, str]
    liveness: dict[int, list[str]]


class PartitionedModule(fx.GraphModule):
    """The stages of a program as children, ``submod_0``, ``submod_1`` and so on, on the very parameters of the model.

    The module is called as the model is. Inputs of other shapes, or the other mode, have the model cut anew at the same places.

    Args:
        name: Function from the index of a stage to the name of its child.
    """

    program: Program
    name_of: Callable[[int], str]
    num_steps: int = 0
    """Steps of the schedule when it was partitioned."""

    def __init__(self, program: Program, name: Callable[[int], str] = "submod_{}".format) -> None:
        parts = _stage_calls(program)
        graph = _graph(program, parts, name)
        super().__init__(
            {name(part.stage): part.module for part in parts}, graph, f"Partitioned{type(program.module).__name__}"
        )
        self.__dict__.update(program=program, name_of=name, _others={})
        self.training = program.module.training

    def recompile(self) -> Any:
        """Compile the graph as ``run_stages``, which serves calls like the one it was made for; ``forward`` stays ours."""
        code = super().recompile()
        cls: Any = type(self)
        cls.run_stages = cls.forward
        del cls.forward
        return code

    def train(self, mode: bool = True) -> PartitionedModule:
        """Set the mode of the stages and of the model, whose modules they share."""
        super().train(mode)
        for module in (self.program.module, *(stage.module for stage in self.program.stages)):
            module.train(mode)
        return self

    def forward(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in turn."""
        program = self.program
        if len(program.stages) == 1 and program.replan is None:
            return getattr(self, self.name_of(0))(*args, **kwargs)
        batch = named_inputs(program.module, args, kwargs)
        now = program if program.replan is None else program.replan(program.module.training, batch)
        module: Any = self
        if now is not program:
            known = self.__dict__["_others"].get(id(now))
            if known is None:
                known = self.__dict__["_others"][id(now)] = PartitionedModule(now, self.name_of)
            module = known
        for child in module.children():
            child.training = program.module.training
        names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
        return module.run_stages(**{name: batch[name] for name in names if name in batch})

    def __deepcopy__(self, memo: dict[int, Any]) -> PartitionedModule:
        """Copy the model and its stages; the copy serves inputs of the same shapes alone."""
        program = self.program
        module = copy.deepcopy(program.module, memo)
        stages = tuple(dataclasses.replace(stage, module=copy.deepcopy(stage.module, memo)) for stage in program.stages)
        return PartitionedModule(dataclasses.replace(program, module=module, stages=stages, replan=None), self.name_of)


def stage_arguments(graph: fx.Graph) -> StageArguments:
    """Return the arguments, names and liveness of the stages in the graph of a partitioned module.

    Args:
        graph: Placeholders, one call of a module per stage in order, items of their results, and an output.
    """
    calls = list(graph.find_nodes(op="call_module"))
    stage_of = {call: index for index, call in enumerate(calls)}
    made: dict[str, int] = {}
    used: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            made[str(node.target)] = -1
        for value in node.all_input_nodes if node.op in ("call_module", "output") else ():
            name, source = _name_and_source(value)
            made.setdefault(name, stage_of.get(source, -1))
            used[name] = stage_of.get(node, len(calls) - 1)
    names = sorted(made, key=lambda name: made[name])  # stable: in the order of the graph for each stage
    alive = {
        stage: [name for name in names if made[name] < stage and used.get(name, -1) >= stage] for stage in range(len(calls))
    }
    arguments = {stage: [_name_and_source(value)[0] for value in _values(call)] for call, stage in stage_of.items()}
    return StageArguments(arguments, {stage: str(call.target) for call, stage in stage_of.items()}, alive)


def _values(call: fx.Node) -> Iterator[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg((call.args, call.kwargs), found.append)
    return iter(found)


def _name_and_source(node: fx.Node) -> tuple[str, fx.Node]:
    """Return the name of a value and the node that it is an item of."""
    keys: list[str] = []
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        keys.append(str(node.args[1]))
        node = node.args[0]
    name = str(node.target) if node.op == "placeholder" else node.name
    return ".".join([name, *reversed(keys)]), node


class _StageCall(NamedTuple):
    """A stage without the values that it only passes on.

    ``gives`` are the names of the values in its result, a tuple or one value; None if the result is the model's.
    """

    stage: int
    module: nn.Module
    reads: list[str]
    batch: tuple[str, ...]
    gives: list[str] | None
    is_tuple: bool


def _stage_calls(program: Program) -> list[_StageCall]:
    if len(program.stages) == 1:
        (stage,) = program.stages
        return [_StageCall(0, stage.module, [], stage.batch_inputs, None, False)]
    sent = [[value.name for value in stage.inputs] for stage in program.stages[1:]]
    return [_stage_call(stage, sent[stage.index] if stage.index < len(sent) else None) for stage in program.stages]


def _stage_call(stage: Stage, sent: list[str] | None) -> _StageCall:
    received = [value.name for value in stage.inputs]
    module = stage.module
    guard = input_check_of(module)
    if not isinstance(module, TracedModule) or not isinstance(guard, StageGuard):
        return _StageCall(stage.index, module, received, stage.batch_inputs, sent, True)
    inputs = dict(zip(received, module.graph.find_nodes(op="placeholder"), strict=False))
    reads = [name for name in received if is_used(inputs[name], is_last=sent is None)]
    gives = None if sent is None else [name for name in sent if name not in received]
    graph = _drop_passed_values(module.graph, {inputs[name] for name in received if name not in reads}, sent, gives)
    kept = tuple(each for name, each in zip(received, guard.received, strict=True) if name in reads)
    made = TracedModule(module, graph, dataclasses.replace(guard, received=kept))
    made.__dict__.update({name: module.__dict__[name] for name in HOOK_ATTRIBUTES})
    return _StageCall(stage.index, made, reads, stage.batch_inputs, gives, gives is not None and len(gives) != 1)


def is_used(node: fx.Node, is_last: bool) -> bool:
    """Return whether a stage does more with a received value than restore its strides and send it on.

    The output of the last stage counts as a use, as it is the model's result.
    """
    return any(is_used(user, is_last) if user.target is with_strides else is_last or user.op != "output" for user in node.users)


def _drop_passed_values(graph: fx.Graph, passed: set[fx.Node], sent: list[str] | None, gives: list[str] | None) -> fx.Graph:
    """Copy a stage's graph without the values that it only passes on."""
    copied, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    result: Any = copied.graph_copy(graph, copies)
    if sent is not None and gives is not None:
        by_name = dict(zip(sent, result, strict=True))
        values = tuple(by_name[name] for name in gives)
        result = values[0] if len(values) == 1 else values
    copied.output(result)
    for node in passed:
        for user in list(copies[node].users):
            if not user.users:
                copied.erase_node(user)
        copied.erase_node(copies[node])
    return copied


def _graph(program: Program, parts: list[_StageCall], name: Callable[[int], str]) -> fx.Graph:
    graph = fx.Graph()
    known: dict[str, fx.Node] = {each: graph.placeholder(each) for each in _inputs(program, parts)}
    result: Any = None
    for part in parts:
        args = tuple(known[each] for each in part.reads)
        kwargs: Mapping[str, Any] = {each: known[each] for each in part.batch}
        if len(parts) == 1 and program.replan is None:
            args, kwargs = call_arguments(program.module, known)
        result = graph.call_module(name(part.stage), args, dict(kwargs))
        for index, value in enumerate(part.gives or ()):
            # a stage that was not traced here also returns values that it passes on; these have a node already
            known[value] = graph.call_function(operator.getitem, (result, index)) if part.is_tuple else result
    graph.output(result)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output", "call_module"))
    return graph


def _inputs(program: Program, parts: list[_StageCall]) -> list[str]:
    """Return the model's arguments that some stage reads, in the order of its signature."""
    parameters = forward_signature(program.module).parameters
    if len(parts) == 1 and not parts[0].batch:
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [
            each
            for each, parameter in parameters.items()
            if parameter.kind not in several and parameter.default is parameter.empty
        ]
    read = list(dict.fromkeys(each for part in parts for each in part.batch))
    return sorted(read, key=lambda each: list(parameters).index(each) if each in parameters else len(parameters))
