"""The program of a ready ``Pipe`` of ``torch.distributed.pipelining``."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from slapo_core import (
    Boundary,
    BuildError,
    Program,
    Schedule,
    Stage,
    TraceError,
    call_arguments,
    forward_signature,
    parameter_facts,
    paths,
)
from slapo_tracing.nodes import difference, fingerprint

from .partition.partitioner import pipeline_ranks
from .partition.stage_module import assign_modules, prune_tree, tie_groups
from .pipe import Pipe
from .torch_pipe.transmitted_parameters import TransmittingStage
from .tracing._torch_private import Name, StageCalls, stage_calls
from .tracing.cuts import cuts_of_steps
from .tracing.flat_trace import named_batch, unshared_tensors

__all__ = ["program_of_pipe"]

_TABLES = ("_parameters", "_buffers")
_pipe_options: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Model to the ``Pipe`` that the current build was given."""


def store_pipe_option(schedule: Schedule, config: dict[str, Any]) -> None:
    """Move the build option ``pipe`` out of the options, for ``program_of_pipe_option``."""
    _pipe_options.pop(schedule.root_module, None)
    if (pipe := config.pop("pipe", None)) is not None:
        _pipe_options[schedule.root_module] = pipe


def program_of_pipe_option(schedule: Schedule) -> Program | None:
    """Return the program of the ``Pipe`` that the current build was given, once; None without one."""
    pipe = _pipe_options.pop(schedule.root_module, None)
    return None if pipe is None else program_of_pipe(pipe, schedule)


def program_of_pipe(pipe: Any, schedule: Schedule) -> Program:
    """Return a program of the stages of a ready ``Pipe``, on the parameters of the schedule's model.

    Parameters have their names in the model; one that torch copied for several stages is one again, and its stages are listed
    in ``ties``. A value for a stage that is not the next one passes through the stages between. The result has the structure
    of the model's. The model and the stages run once on the example inputs, to find the boundaries and compare the results.

    Args:
        pipe: From ``torch.distributed.pipelining.pipeline(model, ...)``; it does not change. Or from ``slapo.pipeline``, made
            of the schedule's own model and without transmitted parameters.
        schedule: Of the same model, in the mode the ``Pipe`` was made in, without steps; its ``example_inputs`` are a
            micro-batch of the shapes that the ``Pipe`` was made with, with a tensor of its own for each argument.

    Raises:
        BuildError: no ``Pipe``, or one of another model, with other parameters, arguments or results; the schedule has steps,
            which the ``Pipe`` lacks, or no example inputs; the number of stages is not a multiple of the pipeline ranks.
    """
    if isinstance(pipe, Pipe):
        return _own_program(pipe, schedule)
    calls = _checked_calls(pipe, schedule)
    root, mesh = schedule.root_module, schedule.mesh
    graphs = [pipe.get_stage_module(index) for index in range(len(calls.arguments))]
    inputs = unshared_tensors(named_batch(root, schedule.example_inputs))
    if unknown := [name for name in calls.inputs if name not in forward_signature(root).parameters]:
        raise BuildError(f"the Pipe takes {unknown[0]!r}, no argument of the model; tensors inside structures cannot be named")
    if missing := [name for name in calls.inputs if name not in inputs]:
        raise BuildError(f"the Pipe takes {missing[0]!r}, which the example inputs lack; give them all that it was made with")
    keep = assign_modules(root, [_tensors_of(graph, root) for graph in graphs])
    modules = [
        TorchPipeStage(graph, root, kept, calls, index) for index, (graph, kept) in enumerate(zip(graphs, keep, strict=True))
    ]
    boundaries = _run(root, modules, inputs)
    traced = fingerprint({name: inputs[name] for name in calls.inputs})
    training = root.training
    stages = tuple(
        Stage(module.index, module, boundaries[module.index], module.batch_inputs, tuple(_paths(graph, root)))
        for module, graph in zip(modules, graphs, strict=True)
    )

    def replan(now_training: bool, batch: Mapping[str, Any]) -> Program:
        if now_training != training:
            raise TraceError(f"the Pipe was made in {'train' if training else 'eval'} mode; make another one for the other")
        given = fingerprint({name: batch.get(name) for name in calls.inputs})
        if given != traced:
            raise TraceError(
                f"the Pipe was made for other inputs, {difference(traced, given, 'the batch')}; make one for these"
            )
        return program

    program = Program(
        module=root,
        stages=stages,
        mesh=mesh,
        original_names={name: parameter_facts(parameter).names for name, parameter in root.named_parameters()},
        ties=tie_groups(root, modules),
        replan=replan,
    )
    return program


def _own_program(pipe: Pipe, schedule: Schedule) -> Program:
    """Return the program of a ``Pipe`` of this package."""
    program = pipe.program
    if program.module is not schedule.root_module:
        raise BuildError("the Pipe was made of another model; make it of the schedule's, which it leaves as it is")
    if any(isinstance(stage.module, TransmittingStage) for stage in program.stages):
        raise BuildError("the Pipe transmits parameters, which an engine keeps as ties; make it with REPLICATE")
    _check_fits(pipe.num_stages, schedule)
    names = {name: parameter_facts(parameter).names for name, parameter in program.module.named_parameters()}
    return dataclasses.replace(program, mesh=schedule.mesh, original_names=names)


class TorchPipeStage(nn.Module):
    """A stage of torch's ``Pipe`` with the calling convention of ``Stage``, and the model's parameters under their names."""

    def __init__(self, graph: nn.Module, root: nn.Module, keep: set[str], calls: StageCalls, index: int) -> None:
        super().__init__()
        held = prune_tree(root, keep)
        for table in (*_TABLES, "_modules"):
            self.__dict__[table] = held.__dict__[table]
        self.__dict__["_non_persistent_buffers_set"] = set(held._non_persistent_buffers_set)
        self.training = root.training
        self.index = index
        self.__dict__["pipe_module"] = _with_shared_tables(graph, self)  # no child: its parameters are this module's
        last = index + 1 == len(calls.arguments)
        made = [name for values in calls.values[:index] for name in values]
        now = [*made, *calls.values[index]]
        later = [value for arguments in calls.arguments[index + 1 :] for value in arguments if isinstance(value, Name)]
        here = [value for value in calls.arguments[index] if isinstance(value, Name)]
        result = [value for value in calls.result if isinstance(value, Name)]
        self._arguments, self._values, self._result = calls.arguments[index], calls.values[index], calls.result
        self.received = tuple(name for name in made if name in {*here, *later, *result})
        self.sent = () if last else tuple(name for name in now if name in {*later, *result})
        self.batch_inputs = tuple(name for name in calls.inputs if name in {*here, *(result if last else ())})
        self.spec: Any = None
        self._is_last = last

    def forward(self, *received: torch.Tensor, **batch: Any) -> Any:
        """Run the stage; return the values that it sends on, or the model's result."""
        known = {**dict(zip(self.received, received, strict=True)), **{name: batch[name] for name in self.batch_inputs}}
        result = self.__dict__["pipe_module"](*_with_values(self._arguments, known))
        known.update({name: result if place is None else result[place] for name, place in self._values.items()})
        if not self._is_last:
            return tuple(known[name] for name in self.sent)
        leaves = _with_values(self._result, known)
        return pytree.tree_unflatten(leaves, self.spec) if self.spec is not None else tuple(leaves)


def _with_values(values: Sequence[Any], known: Mapping[str, Any]) -> list[Any]:
    return [known[value] if isinstance(value, Name) else value for value in values]


def _checked_calls(pipe: Any, schedule: Schedule) -> StageCalls:
    from torch.distributed.pipelining import Pipe as TorchPipe  # noqa: PLC0415  who has a Pipe has imported it

    if not isinstance(pipe, TorchPipe):
        raise BuildError(f"pipe is a {type(pipe).__name__}; give what torch.distributed.pipelining.pipeline returned")
    if pipe.has_loss_and_backward:
        raise BuildError("the Pipe has a backward of its own; make one without a loss specification")
    if schedule.example_inputs is None:
        raise BuildError("the stages of a Pipe run once; give create_schedule example_inputs=, one micro-batch")
    _check_fits(pipe.num_stages, schedule)
    return stage_calls(pipe)


def _check_fits(num_stages: int, schedule: Schedule) -> None:
    """Refuse a schedule with steps, or a mesh for another number of stages."""
    if len(schedule.journal):
        what = "cuts of its own" if cuts_of_steps(schedule.journal) else "steps"
        raise BuildError(f"the schedule has {what}, which the Pipe does not contain; cut with the schedule alone")
    mesh = schedule.mesh
    ranks = pipeline_ranks(mesh) or 1
    if mesh is not None and num_stages % ranks:
        raise BuildError(f"the Pipe has {num_stages} stages, but the mesh has pp={ranks}; give each rank as many stages")


def _tensors_of(graph: nn.Module, root: nn.Module) -> set[str]:
    """Return the names of the model's tensors that a stage holds; refuse parameters that the model lacks."""
    own = {**dict(root.named_parameters(remove_duplicate=False)), **dict(root.named_buffers(remove_duplicate=False))}
    parameters = dict(graph.named_parameters(remove_duplicate=False))
    for name, tensor in parameters.items():
        if name not in own or own[name].shape != tensor.shape:
            has = f"has it as {list(own[name].shape)}" if name in own else "has not"
            raise BuildError(f"the Pipe has a parameter {name!r} {list(tensor.shape)}, but the model {has}; give its own model")
    return {*parameters, *(name for name, _ in graph.named_buffers(remove_duplicate=False) if name in own)}


def _with_shared_tables(graph: nn.Module, held: nn.Module | None) -> nn.Module:
    """Copy a stage's modules; each copy shares the tables of parameters and buffers with the module of its path in ``held``."""
    copied: nn.Module = object.__new__(type(graph))
    copied.__dict__.update(graph.__dict__)
    if held is not None:
        known = {name for table in _TABLES for name in held.__dict__[table]}
        for name, constant in graph._buffers.items():
            if name not in known:  # a constant of the forward, no buffer of the model
                held.register_buffer(name, constant, persistent=False)
        for table in _TABLES:
            copied.__dict__[table] = held.__dict__[table]
    copied.__dict__["_modules"] = {
        name: _with_shared_tables(child, held._modules.get(name) if held is not None else None)
        for name, child in graph._modules.items()
        if child is not None
    }
    return copied


def _paths(graph: nn.Module, root: nn.Module) -> Iterator[str]:
    """Yield the paths of the model's modules without children that a stage runs."""
    for path, module in graph.named_modules():
        if path and not module._modules and hasattr(module, "graph") and paths.find(root, path) is not None:
            yield path


def _run(root: nn.Module, modules: Sequence[TorchPipeStage], inputs: Mapping[str, Any]) -> list[tuple[Boundary, ...]]:
    """Run the model and the stages on the same inputs; return the boundaries. Results that differ are an error."""
    with _restored_state(root), torch.enable_grad():
        state = torch.random.get_rng_state()
        args, kwargs = call_arguments(root, inputs)
        leaves, spec = pytree.tree_flatten(root(*args, **kwargs))
    with _restored_state(root), torch.enable_grad():
        torch.random.set_rng_state(state)
        boundaries: list[tuple[Boundary, ...]] = []
        sent: Any = ()
        versions = {tensor: tensor._version for tensor in root.buffers()}
        for module in modules:
            boundaries.append(tuple(map(_boundary, module.received, sent)))
            try:
                sent = module(*sent, **{name: inputs[name] for name in module.batch_inputs})
            except Exception as err:
                what = f"stage {module.index} of the Pipe does not run on the example inputs, {str(err).partition(chr(10))[0]}"
                raise BuildError(f"{what}; make the Pipe from inputs like these, or cut with the schedule alone") from err
        _check_owners(root, modules, {id(tensor) for tensor, version in versions.items() if tensor._version != version})
    given = list(sent)
    if len(given) != len(leaves) or not all(map(_is_close, given, leaves)):
        raise BuildError(
            "the stages of the Pipe give another result than the model on the example inputs; make the Pipe from this model, "
            "in this mode, with a tensor of its own for each argument"
        )
    modules[-1].spec = spec
    return boundaries


def _check_owners(root: nn.Module, modules: Sequence[TorchPipeStage], changed: set[int]) -> None:
    """Refuse a buffer that one stage changes and another uses: every process has a copy of its own."""
    for name, tensor in root.named_buffers():
        users = [module.index for module in modules if any(tensor is own for own in module.buffers())]
        if id(tensor) in changed and len(users) > 1:
            numbers = " and ".join(map(str, users))
            raise BuildError(
                f"{name!r} changes and is used by stages {numbers} of the Pipe, which have a copy each; split elsewhere"
            )


def _boundary(name: str, value: Any) -> Boundary:
    if not isinstance(value, torch.Tensor):
        raise BuildError(f"a {type(value).__name__}, {name!r}, crosses between stages of the Pipe, but only tensors can")
    return Boundary(name, tuple(value.shape), value.dtype, value.requires_grad)


def _is_close(given: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(given, torch.Tensor):
        return bool(given is expected or given == expected)
    if given.shape != expected.shape or given.dtype != expected.dtype or expected.is_meta:
        return given.shape == expected.shape and given.dtype == expected.dtype
    return torch.allclose(given, expected, rtol=1e-2, atol=1e-4 * float(expected.detach().abs().max()), equal_nan=True)


@contextmanager
def _restored_state(root: nn.Module) -> Iterator[None]:
    """Restore buffers and random states at the end of the context."""
    before = copy.deepcopy({name: tensor.detach() for name, tensor in root.named_buffers()})
    devices = {tensor.device for tensor in root.parameters() if tensor.device.type not in ("cpu", "meta")}
    try:
        with torch.random.fork_rng(sorted(device.index for device in devices)):
            yield
    finally:
        with torch.no_grad():
            for name, tensor in root.named_buffers():
                tensor.copy_(before[name])
