"""Analysis of a partition: which stage runs what, what each takes and gives, and what crosses between them."""

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
    """One value that crosses between stages. In the forward it lives from the stage that makes it to the last that uses it.

    Where it ``requires_grad`` its gradient goes the same way back: from the last of ``used_by`` to ``made_by``, and each stage
    of ``used_by`` adds its share.

    Args:
        name: Its name in the graphs of the stages.
        shape: For inputs like those the program was made for, as all sizes here.
        dtype: Its dtype.
        requires_grad: Whether a gradient flows back.
        made_by: The stage that computes it.
        passed_by: Stages that receive it only to send it on, ascending.
        used_by: Stages that receive and read it, ascending; some of them send it on as well.
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
        received: Stage to the names of the values it gets from the stage before, in order.
        batch_inputs: Stage to the names of the model's arguments it reads from the batch.
        results: Stage to the names of what it gives; of the last stage the keys of the model's result, or its nodes' names.
        values: Every value that crosses, in the order in which they are sent first.
        forward: Stage to the values that are alive while it runs its forward: received, or made for a later stage.
        backward: Stage to those whose gradients are alive while it runs its backward.
        named: The same by the names that ``generate_pipeline_partition`` gives to the stages and their values.
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
        """Bytes that a stage sends to the next in one forward; its gradients come back in at most as many."""
        return sum(value.nbytes for value in self.values if stage + 1 in value.received_by)


def module_stages(schedule: Schedule) -> dict[str, tuple[int, ...]]:
    """Carry the cuts of a schedule to every module of the model. Nothing is changed.

    Args:
        schedule: Any handle of the schedule.

    Returns:
        Path of each module that runs to the stages that run it or a part of it, ascending; ``""`` is the whole model. A module
        that a cut lies in has several stages, and so have one that is called on both sides of a cut and one, such as a
        rotary table, that stages run for themselves rather than send its result. What is inside of a module that no cut lies
        in goes with it.

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
    """Return a program, or that of a schedule, which is partitioned for it unless it is one of stages already.

    Args:
        given: A program or a schedule.
        verb: What the caller does with it, for the error.
        wanted: What the caller takes, for the error.

    Raises:
        BuildError: neither of the two.
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
    """Return what each stage takes, its name, and which tensors must be alive when it starts.

    Args:
        top_mod: A partitioned top module: its graph calls the stages in turn. Or a program, or any handle of a schedule, which
            is partitioned first.

    Returns:
        ``(stage_id_2_arg_names, stage_id_2_name, liveness)``. Of a program or a schedule a ``PipelineAnalysis``, which unpacks
        into these, and knows for each value that crosses who makes, passes and uses it, forward and backward.

    Raises:
        BuildError: none of these.
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
    """Paths of the modules that were taken apart and whose functions the stage runs."""
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
        reads = _reads(stage, is_last=stage is program.stages[-1])
        for value in stage.inputs:
            boundaries.setdefault(value.name, value)
            (used if value.name in reads else passed).setdefault(value.name, []).append(stage.index)
    found = []
    for name, value in boundaries.items():
        by = passed.get(name, []), used.get(name, [])
        made_by = min((*by[0], *by[1])) - 1
        shape, dtype, requires_grad = value.shape, value.dtype, value.requires_grad
        found.append(LiveValue(name, shape, dtype, requires_grad, made_by, tuple(by[0]), tuple(by[1])))
    return tuple(found)


def _reads(stage: Stage, is_last: bool) -> set[str]:
    """Names of the received values that a stage computes with or gives as the model's; all where it is no graph."""
    graph = _graph(stage)
    if graph is None:
        return {value.name for value in stage.inputs}
    nodes = graph.find_nodes(op="placeholder")
    return {value.name for value, node in zip(stage.inputs, nodes, strict=False) if is_used(node, is_last)}


def _live_range(value: LiveValue) -> range:
    return range(value.made_by, value.received_by[-1] + 1)


def result_keys(module: nn.Module) -> tuple[str, ...] | None:
    """Return the keys of the model's result where it is a mapping, from the module of its last stage."""
    module = module.__dict__.get("inner", module)
    if not isinstance(module, fx.GraphModule) or not module.graph.find_nodes(op="output"):
        return None
    result = module.graph.output_node().args[0]
    template = getattr(result.args[0], "value", None) if isinstance(result, fx.Node) and result.args else None
    content = result if isinstance(result, Mapping) else template
    return tuple(str(key) for key, value in content.items() if value is not None) if isinstance(content, Mapping) else None


def _result_names(stage: Stage) -> tuple[str, ...]:
    """Keys of the model's result where it is a mapping, else the names of the nodes it is made of."""
    graph = _graph(stage)
    if graph is None or not (graph.find_nodes(op="output")):
        return ("output",)
    return result_keys(stage.module) or tuple(node.name for node in graph.output_node().all_input_nodes)
