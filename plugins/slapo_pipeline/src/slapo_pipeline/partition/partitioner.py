"""Partitioning of a schedule with cuts into a program of stages, and the cache of such programs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from slapo_core import (
    Boundary,
    BuildError,
    Program,
    Schedule,
    Stage,
    TraceError,
    get_logger,
    parameter_facts,
    paths,
    shard_spec,
)
from slapo_tracing.graphs import guard_of
from slapo_tracing.nodes import autocast_state, fingerprint
from slapo_tracing.recording import Attributes
from slapo_tracing.tracers import synthetic_inputs

from ..assignment.block_inlining import DividedGraph, divide_graph, with_inlined_blocks
from ..assignment.node_assignment import Assignment
from ..assignment.state_ownership import StateOwnership
from ..tracing.cuts import cuts_of_steps
from ..tracing.flat_trace import CachedTrace, inlined_paths, named_batch, trace_flat, unshared_tensors
from ..tracing.root_hooks import is_indivisible, move_root_hooks, without_root_hooks
from .program_validity import InlinedModules, ValueGuard
from .stage_module import assign_modules, batch_argument_names, stage_module, tie_groups
from .symbolic_stages import symbolic_assignment, symbolic_stage

CACHED_TRACE = "slapo_pipeline.tracing.flat_trace"
"""Key of a schedule's metadata under which ``pipeline`` leaves its trace."""
_MAX_PROGRAMS = 16


def partition(schedule: Schedule) -> Program | None:
    """Return the program in stages, or None if the schedule has no cuts.

    Raises:
        BuildError: the number of stages is not a multiple of the mesh's pipeline ranks; no example inputs, and a forward that
            ``torch.fx`` cannot trace; a module around a cut was wrapped later; a lazy parameter has no shape yet.
        ScheduleError: a cut leaves a stage with no node to run.
        TraceError: the model cannot be traced, or a value that is not a tensor would have to cross a boundary.
    """
    cuts = cuts_of_steps(schedule.journal)
    if not cuts:
        return None
    mesh, root = schedule.mesh, schedule.root_module
    ranks = pipeline_ranks(mesh) or 1
    if mesh is not None and (len(cuts) + 1) % ranks:
        cut = "1 cut makes" if len(cuts) == 1 else f"{len(cuts)} cuts make"
        remedy = f"make a multiple of {ranks} stages, of which each rank runs as many"
        raise BuildError(f"{cut} {len(cuts) + 1} stages, but the mesh has pp={ranks}; {remedy}")
    check_cuts(root, cuts)
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise BuildError(f"{name!r} has no shape before the first call; run the model once before create_schedule")
    kept = schedule.metadata.primitives.pop(CACHED_TRACE, None)
    inputs = None if schedule.example_inputs is None else named_batch(root, schedule.example_inputs)
    return Partitioner(root, cuts, mesh, kept).first_program(inputs)


def pipeline_ranks(mesh: DeviceMesh | None) -> int | None:
    """Return the size of the mesh's axis ``pp``, or None if there is no such axis."""
    return mesh["pp"].size() if mesh is not None and "pp" in (mesh.mesh_dim_names or ()) else None


class _CachedProgram(NamedTuple):
    program: Program
    attributes: Attributes
    inlined: InlinedModules
    value_guard: ValueGuard


class Partitioner:
    """Divider of one model at fixed cuts, for inputs of any shape.

    Args:
        kept: Trace of the model from the search for cuts.
        any_values: True for stages that serve batches of other values too, where the forward can be traced without values.
    """

    def __init__(
        self,
        root: nn.Module,
        cuts: list[str],
        mesh: DeviceMesh | None,
        kept: CachedTrace | None = None,
        any_values: bool = False,
    ) -> None:
        self.root, self.cuts, self.mesh, self._kept, self.any_values = root, cuts, mesh, kept, any_values
        self._programs: OrderedDict[Any, list[_CachedProgram]] = OrderedDict()
        self._state = StateOwnership(root)

    def program(self, training: bool, inputs: Mapping[str, Any]) -> Program:
        """Return the program for a mode and for inputs like these; see ``Program.replan``.

        A program serves a call with the same mode, shapes, trained parameters (they decide which gradients cross), dtypes
        (engines change them), and values of the batch that the forward's Python code reads. It is made anew if an attribute,
        hook, parameter, buffer or submodule that its graphs inline was replaced.

        Raises:
            BuildError: a module around a cut was wrapped later.
        """
        parameters = [(parameter.requires_grad, parameter.dtype) for parameter in self.root.parameters()]
        trained, types = bytes(trained for trained, _ in parameters), hash(tuple(dtype for _, dtype in parameters))
        key = repr((training, torch.is_grad_enabled(), trained, types, autocast_state(), fingerprint(dict(inputs))))
        with _training_mode(self.root, training):
            plans = self._programs.setdefault(key, [])
            plan = next((plan for plan in plans if plan.value_guard.accepts(inputs)), None)
            if plan is not None and plan.inlined.wrapping_changed(self.root):
                check_cuts(self.root, self.cuts)
                plans.clear()
            elif plan is not None and (plan.attributes.find_change(self.root) or plan.inlined.has_replaced_members(self.root)):
                plans.clear()
            if plan is None or plan not in plans:
                plan = self._cut(unshared_tensors(inputs))
            plans[:] = [plan, *(other for other in plans if other is not plan)][:_MAX_PROGRAMS]
        self._programs.move_to_end(key)
        if len(self._programs) > _MAX_PROGRAMS:
            self._programs.popitem(last=False)
        return plan.program

    def first_program(self, inputs: Mapping[str, Any] | None) -> Program:
        """Return the program for example inputs, or one without shapes if there are none; its ``replan`` adds shapes.

        Raises:
            BuildError: the forward cannot be traced without example inputs.
        """
        if inputs is None:
            try:
                return self._symbolic_program()
            except BuildError:
                if (inputs := synthetic_inputs(self.root)) is None:
                    raise
        return self.program(self.root.training, inputs)

    def _symbolic_program(self) -> Program:
        with without_root_hooks(self.root):
            assignment = symbolic_assignment(self.root, self.cuts)
        used = [_used_paths(nodes) for nodes in assignment.nodes]
        keep = assign_modules(self.root, used)
        modules = [symbolic_stage(self.root, assignment, index, kept) for index, kept in enumerate(keep)]
        return self._assemble(assignment, used, keep, modules)

    def _cut(self, inputs: Mapping[str, Any]) -> _CachedProgram:
        kept, self._kept = self._kept and self._kept.pop_if_valid(self.root, inputs, self.cuts), None
        with without_root_hooks(self.root):
            flat = kept or trace_flat(self.root, inputs, self.cuts, any_values=self.any_values)
            coarse = divide_graph(self.root, flat, self.cuts)
            fine = with_inlined_blocks(self.root, inputs, self.cuts, coarse, self.any_values)
        if fine is not None:
            try:
                return self._program_of_graph(fine, inputs)
            except TraceError:
                get_logger().debug("pipeline: blocks are not inlined, as their contents cannot be divided")
        return self._program_of_graph(coarse, inputs)

    def _program_of_graph(self, flat: DividedGraph, inputs: Mapping[str, Any]) -> _CachedProgram:
        root, (traced, assignment) = self.root, flat
        used = [_used_paths(nodes) for nodes in assignment.nodes]
        keep = assign_modules(root, used)
        modules = [stage_module(traced, root, assignment, index, kept, inputs) for index, kept in enumerate(keep)]
        program = self._assemble(assignment, used, keep, modules)
        guard = guard_of(traced)
        assert guard is not None
        assert guard.attributes is not None
        inside = {str(node.meta.get("module", "")) for nodes in assignment.nodes for node in nodes}
        return _CachedProgram(
            program,
            guard.attributes,
            InlinedModules(root, inside | inlined_paths(self.cuts), used, modules),
            ValueGuard(traced, root),
        )

    def _assemble(
        self, assignment: Assignment, used: list[set[str]], keep: list[set[str]], modules: Sequence[nn.Module]
    ) -> Program:
        root = self.root
        self._state.check(assignment)
        if self.mesh is not None:
            self._state.check_weight_owners(used, keep)
        stages = [_stage(index, module, assignment) for index, module in enumerate(modules)]
        move_root_hooks(root, modules, [stage.batch_inputs for stage in stages])
        named = dict(root.named_parameters())
        return Program(
            module=root,
            stages=tuple(stages),
            mesh=self.mesh,
            shard_specs={name: spec for name, parameter in named.items() if (spec := shard_spec(parameter)) is not None},
            original_names={name: parameter_facts(parameter).names for name, parameter in named.items()},
            ties=tie_groups(root, modules),
            replan=self.program,
        )


def for_any_values(program: Program, example_inputs: Any) -> Program:
    """Return a program whose stages serve batches of any values, for users who run the stages themselves.

    Stages take the branches that the forward takes for the values of their example inputs, such as no mask if nothing is
    padded, and refuse a batch with another answer. An engine has a program for each answer. The stages of this program make
    masks in any case. They still refuse a batch if the forward cannot be traced without values.

    Args:
        program: A program of a schedule with cuts; other programs are returned as they are.
        example_inputs: Of the shapes of one micro-batch.
    """
    owner = getattr(program.replan, "__self__", None)
    if not isinstance(owner, Partitioner) or owner.any_values:
        return program
    general = Partitioner(owner.root, owner.cuts, owner.mesh, any_values=True)
    return general.program(owner.root.training, named_batch(owner.root, example_inputs))


@contextmanager
def _training_mode(root: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in root.modules()] if root.training != training else []
    try:
        root.train(training) if modes else None
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _stage(index: int, module: nn.Module, assignment: Assignment) -> Stage:
    nodes = assignment.nodes[index]
    return Stage(
        index=index,
        module=module,
        inputs=tuple(map(_boundary, assignment.received[index])),
        batch_inputs=batch_argument_names(nodes),
        paths=tuple(dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module")),
    )


def _boundary(node: fx.Node) -> Boundary:
    value = node.meta["val"]
    return Boundary(node.name, tuple(value.shape), value.dtype, value.requires_grad)


def _used_paths(nodes: list[fx.Node]) -> set[str]:
    return {str(node.target) for node in nodes if node.op in ("call_module", "get_attr")}


def check_cuts(root: nn.Module, cuts: list[str]) -> None:
    """Refuse a cut whose module is gone, or lies inside a module that was wrapped later.

    The modules around a cut are inlined, which would drop a wrapper.
    """
    for path in cuts:
        if paths.find(root, path) is None:
            raise BuildError(f"the model is cut at {path!r}, but that module is gone; undo the cut, or what removed the module")
        names = path.split(".")
        for depth in range(len(names)):
            outer = ".".join(names[:depth])
            if is_indivisible(root, root.get_submodule(outer)):
                what = f"{outer!r}, which was wrapped or got hooks" if outer else "'the whole model', which was wrapped"
                raise BuildError(
                    f"the model is cut at {path!r}, inside {what} since and runs as one piece; undo the cut or the wrapping"
                )
