"""Analysis of a partition: the modules, inputs and outputs of each stage, and the values that cross between stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import fx, nn

from slapo_core import Boundary, BuildError, Program, Schedule, Stage, build_program

from .partition.partitioned_module import PartitionedModule, StageArguments, is_used, stage_arguments

__all__ = ["LiveValue", "PipelineAnalysis", "analyze_pipeline_module", "module_stages"]


@dataclass(frozen=True)
class LiveValue:
    """One value that crosses between stages. In the forward it lives from the stage that computes it to the last that uses it.

    If it requires a gradient, the gradient goes the same way back: from the last stage of ``used_by`` to ``made_by``, and each
    stage of ``used_by`` adds its share.

    Args:
        name: Its name in the graphs of the stages.
        shape: Its shape for the inputs the program was made for, as for all sizes here.
        dtype: Its dtype.
        requires_grad: Whether a gradient flows back.
        made_by: The stage that computes it.
        passed_by: Stages that receive it only to send it on, ascending.
        used_by: Stages that receive and read it, ascending; some of them also send it on.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    made_by: int
    passed_by: tuple[int, ...]
    used_by: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one transfer from a stage to the next."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def received_by(self) -> tuple[int, ...]:
        """The stages it is sent to, ascending."""
        return tuple(sorted((*self.passed_by, *self.used_by)))


@dataclass(frozen=True)
class PipelineAnalysis:
    """Inputs and outputs of each stage of a program, and lifetimes of the values between them.

    Args:
        stage_names: One per stage: ``"stage_0"``, ``"stage_1"``, …
        received: Stage to the names of the values it receives from the previous stage, in order.
        batch_inputs: Stage to the names of the model's arguments it reads from the batch.
        results: Stage to the names of its results; for the last stage, the keys of the model's result or its nodes' names.
        values: Every value that crosses, in the order in which they are first sent.
        forward: Stage to the values that are alive during its forward: received, or computed for a later stage.
        backward: Stage to the values whose gradients are alive during its backward.
        named: The same with the names that ``generate_pipeline_partition`` gives to the stages and their values.
    """

    stage_names: tuple[str, ...]
    received: Mapping[int, tuple[str, ...]]
    batch_inputs: Mapping[int, tuple[str, ...]]
    results: Mapping[int, tuple[str, ...]]
    values: tuple[LiveValue, ...]
    forward: Mapping[int, tuple[str, ...]]
    backward: Mapping[int, tuple[str, ...]]
    named: StageArguments

    def __iter__(self) -> Iterator[Any]:
        """Unpack as ``stage_id_2_arg_names, stage_id_2_name, liveness``."""
        return iter(self.named)

    @property
    def arguments(self) -> dict[int, tuple[str, ...]]:
        """Stage to the names of all its arguments: received ones, then those from the batch."""
        return {stage: (*names, *self.batch_inputs[stage]) for stage, names in self.received.items()}

    def bytes_sent(self, stage: int) -> int:
        """Return the bytes that a stage sends to the next in one forward; the gradients that return are at most as many."""
        return sum(value.nbytes for value in self.values if stage + 1 in value.received_by)


def module_stages(schedule: Schedule) -> dict[str, tuple[int, ...]]:
    """Return the stages of every module of the model. The schedule does not change.

    Args:
        schedule: Any handle of the schedule.

    Returns:
        Path of each module that runs to the stages that run it or a part of it, ascending; ``""`` is the whole model. A module
        has several stages if a cut lies inside it, if it is called on both sides of a cut, or if every stage runs it itself
        rather than send its result, as a rotary table. Submodules of a module without a cut inside have its stages.

    Raises:
        BuildError, ScheduleError, TraceError: see ``generate_pipeline_partition``.
    """
    program = program_of(schedule, "partition", "what create_schedule returned")
    root = program.module
    stages: dict[nn.Module, set[int]] = {root: {stage.index for stage in program.stages}}
    for stage in program.stages:
        for path in _inlined_by(stage):
            stages.setdefault(root.get_submodule(path), set()).add(stage.index)
        for path in stage.paths:
            for module in root.get_submodule(path).modules():
                stages.setdefault(module, set()).add(stage.index)
    named = list(root.named_modules(remove_duplicate=False))
    if len(program.stages) == 1:
        return dict.fromkeys((path for path, _ in named), (0,))
    modules = dict(named)
    for path, module in reversed(named):  # lists of modules do not run themselves
        if path and module in stages:
            stages.setdefault(modules[path.rpartition(".")[0]], set()).update(stages[module])
    return {path: tuple(sorted(stages[module])) for path, module in named if module in stages}


def program_of(given: Program | Schedule, verb: str, wanted: str) -> Program:
    """Return the given program, or the program of a schedule, which is partitioned unless its module is partitioned already.

    Args:
        given: A program or a schedule.
        verb: The caller's action, for the error.
        wanted: The arguments that the caller takes, for the error.

    Raises:
        BuildError: the argument is neither of the two.
    """
    if isinstance(given, Program):
        return given
    if not isinstance(given, Schedule):
        raise BuildError(f"cannot {verb} a {type(given).__name__}; give {wanted}")
    module = given.root_module
    return module.program if isinstance(module, PartitionedModule) else build_program(given)


@overload
def analyze_pipeline_module(top_mod: Program | Schedule) -> PipelineAnalysis: ...


@overload
def analyze_pipeline_module(top_mod: nn.Module) -> StageArguments: ...


def analyze_pipeline_module(top_mod: nn.Module | Program | Schedule) -> StageArguments | PipelineAnalysis:
    """Return the arguments and the name of each stage, and the tensors that must be alive when it starts.

    Args:
        top_mod: A partitioned top module, whose graph calls the stages in turn; or a program; or any handle of a schedule,
            which is partitioned first.

    Returns:
        ``(stage_id_2_arg_names, stage_id_2_name, liveness)``. For a program or a schedule, a ``PipelineAnalysis``, which
        unpacks into these and has the stages that compute, pass on and use each value that crosses, forward and backward.

    Raises:
        BuildError: the argument is none of these.
        BuildError, ScheduleError, TraceError: see ``generate_pipeline_partition``.
    """
    if isinstance(top_mod, fx.GraphModule):
        return stage_arguments(top_mod.graph)
    given: Any = top_mod
    program = program_of(given, "analyze", "a partitioned module, a Program or a schedule")
    stages = program.stages
    values = _values(program)
    numbers = range(len(stages))
    return PipelineAnalysis(
        stage_names=tuple(f"stage_{index}" for index in numbers),
        received={stage.index: tuple(value.name for value in stage.inputs) for stage in stages},
        batch_inputs={stage.index: stage.batch_inputs for stage in stages},
        results={
            **{index: tuple(value.name for value in stages[index + 1].inputs) for index in numbers[:-1]},
            numbers[-1]: _result_names(stages[-1]),
        },
        values=values,
        forward={index: tuple(value.name for value in values if index in _live_range(value)) for index in numbers},
        backward={
            index: tuple(value.name for value in values if value.requires_grad and index in _live_range(value))
            for index in numbers
        },
        named=stage_arguments(PartitionedModule(program).graph),
    )


def _inlined_by(stage: Stage) -> set[str]:
    """Return the paths of the inlined modules that have nodes in the stage."""
    graph = _graph(stage)
    nodes = [node for node in graph.nodes if node.op not in ("get_attr", "placeholder", "output")] if graph is not None else []
    return {node.meta["module"] for node in nodes if node.meta.get("module")}


def _graph(stage: Stage) -> fx.Graph | None:
    return stage.module.graph if isinstance(stage.module, fx.GraphModule) else None


def _values(program: Program) -> tuple[LiveValue, ...]:
    boundaries: dict[str, Boundary] = {}
    passed: dict[str, list[int]] = {}
    used: dict[str, list[int]] = {}
    for stage in program.stages:
        reads = _read_names(stage, is_last=stage is program.stages[-1])
        for value in stage.inputs:
            boundaries.setdefault(value.name, value)
            (used if value.name in reads else passed).setdefault(value.name, []).append(stage.index)
    found = []
    for name, value in boundaries.items():
        by = passed.get(name, []), used.get(name, [])
        made_by = min((*by[0], *by[1])) - 1
        found.append(LiveValue(name, value.shape, value.dtype, value.requires_grad, made_by, *map(tuple, by)))
    return tuple(found)


def _read_names(stage: Stage, is_last: bool) -> set[str]:
    """Return the names of the received values that a stage reads or returns as the model's; all if it has no graph."""
    graph = _graph(stage)
    if graph is None:
        return {value.name for value in stage.inputs}
    nodes = graph.find_nodes(op="placeholder")
    return {value.name for value, node in zip(stage.inputs, nodes, strict=False) if is_used(node, is_last)}


def _live_range(value: LiveValue) -> range:
    return range(value.made_by, value.received_by[-1] + 1)


def result_keys(module: nn.Module) -> tuple[str, ...] | None:
    """Return the keys of the model's result from the module of its last stage, or None if the result is not a mapping."""
    module = module.__dict__.get("inner", module)
    if not isinstance(module, fx.GraphModule) or not module.graph.find_nodes(op="output"):
        return None
    result = module.graph.output_node().args[0]
    template = getattr(result.args[0], "value", None) if isinstance(result, fx.Node) and result.args else None
    content = result if isinstance(result, Mapping) else template
    return tuple(str(key) for key, value in content.items() if value is not None) if isinstance(content, Mapping) else None


def _result_names(stage: Stage) -> tuple[str, ...]:
    """Return the keys of the model's result if it is a mapping, else the names of its nodes."""
    graph = _graph(stage)
    if graph is None or not (graph.find_nodes(op="output")):
        return ("output",)
    return result_keys(stage.module) or tuple(node.name for node in graph.output_node().all_input_nodes)
