"""Plan of a model with many equal blocks: derived with few of them, and its steps repeated in the others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from slapo_core import Schedule, ScheduleError, Step, TraceError, get_logger, parameter_facts, paths, savepoint
from slapo_tracing.nodes import module_signature, plain_attributes

from ...splitting.module_paths import ancestors
from ...splitting.persistent_hooks import mark_gradients_verified, reduces_gradient
from ...syncs.sync_hooks import join_shared_reduction
from ..local_sizes.adapted_modules import is_inside
from .copied_forwards import copied_forwards, runs_from_graph
from .held_messages import messages_of_success
from .repeated_blocks import RepeatedBlocks, repeated_blocks, without_repeated

Result = TypeVar("Result")


class UnequalBlocksError(ScheduleError):
    """Error of a plan whose steps in one block say nothing about the others."""


def derive_once(schedule: Schedule, derive: Callable[..., Result]) -> Result:
    """Derive a plan with few blocks of each run of equal ones, take its steps in the others too, and return its result.

    If the model does not run without some blocks, or blocks that stay get different steps, the plan is derived for all. Each
    rank decides alike, as it has the same model.

    Args:
        schedule: Schedule of the module.
        derive: Derives the plan and takes its steps; called with ``is_part=True`` where blocks are left out.
    """
    for module in schedule.mod.modules():  # before the plan puts hooks on them for a moment
        schedule.touch(module)
    if not (runs := repeated_blocks(schedule)):
        return derive()
    try:
        with messages_of_success(), savepoint(schedule):
            for module in schedule.mod.modules():
                schedule.touch(module)
            begin = len(schedule._root.children)
            with without_repeated(runs):
                result = derive(is_part=True)
            _repeat(schedule, begin, runs)
            return result
    except (ScheduleError, TraceError) as err:
        get_logger().debug("tensor_parallel(%r): the plan is derived for all blocks: %s", schedule.path, err)
    return derive()


def _repeat(schedule: Schedule, begin: int, runs: Sequence[RepeatedBlocks]) -> None:
    """Take the steps of some blocks, which are those from ``begin`` on, in the blocks that were left out."""
    steps = schedule._root.children[begin:]
    for run in runs:
        holder = paths.join(schedule.path, run.path)
        own = {name: [*_steps_in(steps, f"{holder}.{name}")] for name in (*run.models, *run.confirming)}
        _check_graphs(schedule, run)
        for name, model in run.confirming.items():
            if list(map(str, own[name])) != list(map(str, own[model])):
                raise UnequalBlocksError(f"{name!r} and {model!r} have different steps", path=holder)
            _check_equal(run, name, model, holder)
        for name, model in run.left_out.items():
            block = schedule[paths.join(run.path, name)]
            forwards = copied_forwards(block.mod, run.holder.get_submodule(model), block.path)
            for step in own[model]:
                (block[step.path] if step.path else block).apply(step.name, *step.args, **step.kwargs)
            for each in forwards:
                each.install(block)
    for index, step in enumerate(steps):
        schedule._root.children[begin + index] = _with_left_out(schedule, step, runs)
    for run in runs:
        holder = paths.join(schedule.path, run.path)
        for name, model in run.left_out.items():
            _copy_attributes(schedule, run, name, model)
            _check_equal(run, name, model, holder)


def _steps_in(steps: Iterable[Step], path: str) -> Iterator[Step]:
    """Yield the steps inside a block, with paths below it."""
    for step in steps:
        if is_inside(step.path, path):
            yield Step(step.path.removeprefix(path).removeprefix("."), step.name, step.args, step.kwargs)


def _with_left_out(schedule: Schedule, step: Step, runs: Sequence[RepeatedBlocks]) -> Step:
    """Return a step around blocks with the blocks that were left out: modules of all of them share a reduction.

    Raises:
        UnequalBlocksError: the step names modules of several blocks in another way.
    """
    for run in runs:
        holder = paths.join(schedule.path, run.path)
        if is_inside(step.path, holder) and step.path != holder:
            continue
        start = len(step.path) + 1 if step.path else 0
        named = {name: _names_in(step, f"{holder}.{name}") for name in run.holder._modules}
        if not any(named.values()):
            continue
        shares = (step.name, step.args) == ("sync", ("bwd_post", "all_reduce")) and step.kwargs.keys() == {"of"}
        if not shares or any(named[name] != named[model] for name, model in run.confirming.items()):
            raise UnequalBlocksError(f"{step} concerns several blocks", path=schedule.path)
        more = [f"{holder}.{name}{each}"[start:] for name, model in run.left_out.items() for each in named[model]]
        of, top = [*step.kwargs["of"]], schedule.get_top_schedule()
        join_shared_reduction(top[step.path] if step.path else top, of, more)
        step = replace(step, kwargs={"of": of + more})
    return step


def _names_in(step: Step, block: str) -> list[str]:
    """Return what a step names inside a block, as paths below it, each with a dot in front."""
    named = (paths.join(step.path, each) for each in _strings((step.args, tuple(step.kwargs.values()))))
    return [each.removeprefix(block) for each in named if is_inside(each, block)]


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings(each)


def _pairs(run: RepeatedBlocks, name: str, model: str) -> list[tuple[nn.Module, nn.Module]]:
    block, other = run.holder._modules[name], run.holder._modules[model]
    assert block is not None
    assert other is not None
    return [*zip(block.modules(), other.modules(), strict=True)]


def _check_graphs(schedule: Schedule, run: RepeatedBlocks) -> None:
    """Refuse a graph of a module around the blocks, as it calls few of them."""
    if any(runs_from_graph(schedule.mod.get_submodule(path)) for path in ancestors(run.path)):
        raise UnequalBlocksError(f"a module around {run.path!r} runs from a graph", path=schedule.path)


def _copy_attributes(schedule: Schedule, run: RepeatedBlocks, name: str, model: str) -> None:
    """Give the modules of a block the attributes that the plan has set in the block that stands for it."""
    for module, other in _pairs(run, name, model):
        schedule.touch(module)
        state = vars(module)
        state.update(plain_attributes(vars(other)))
        if "config" in state and vars(other)["config"] is not state["config"]:
            state["config"] = copy.copy(vars(other)["config"])
        if any(reduces_gradient(each, by_plan=True) for each in other.parameters(recurse=False)):
            mark_gradients_verified(module)


def _check_equal(run: RepeatedBlocks, name: str, model: str, holder: str) -> None:
    for module, other in _pairs(run, name, model):
        if _facts(module) != _facts(other):
            raise UnequalBlocksError(f"{name!r} and {model!r} differ in a {type(module).__name__}", path=holder)


def _facts(module: nn.Module) -> Hashable:
    """Return what a plan may change in a module."""
    own = {**module._parameters, **module._buffers}
    tensors = [(name, _tensor_facts(each)) for name, each in own.items() if each is not None]
    config: Any = vars(module).get("config")
    settings = tuple(plain_attributes(vars(config)).items()) if hasattr(config, "__dict__") else None
    return (module_signature(module), frozenset(vars(module)), tuple(tensors), settings)


def _tensor_facts(tensor: torch.Tensor) -> Hashable:
    spec = parameter_facts(tensor).spec
    hooks = [(type(hook).__qualname__, *plain_attributes(getattr(hook, "__dict__", {})).items()) for hook in _hooks(tensor)]
    return (tuple(tensor.shape), repr(spec), tuple(hooks))


def _hooks(tensor: torch.Tensor) -> list[Any]:
    return [*(tensor._backward_hooks or {}).values()]
