"""The views of a program, all of its stages, and of an engine, those of this rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
from torch import nn

from slapo_core import Boundary, Engine, Program, Stage

from .module_tree import TreeBuilder, tied_names
from .schedule_view import mesh_text, parameter_text
from .short_values import format_count, join_first, printable, short_value
from .view import Facts, Tree, View


def view_of_program(program: Program) -> View:
    """Return the view of a program."""
    facts = (("stages", str(len(program.stages))), *_facts(program))
    return View(f"Program of {type(program.module).__name__}", facts, tuple(_stage(program, stage) for stage in program.stages))


def view_of_engine(engine: Engine) -> View:
    """Return the view of an engine."""
    program: Program | None = getattr(engine, "program", None)
    options = getattr(engine, "options", None)
    facts = (
        ("target", str(getattr(options, "target", ""))),
        ("options", _non_default_options(options)),
        ("optimizer", _optimizer(engine.optimizer)),
        ("steps", str(getattr(engine, "steps", ""))),
    )
    name = type(engine).__name__
    if program is None:
        return View(name, facts, (_tree(engine.module, None),))
    own = _own_stages(program)
    count = f"{join_first((str(stage.index) for stage in own), 8)} of {len(program.stages)}" if len(program.stages) > 1 else ""
    return View(name, (*facts, ("stages here", count), *_facts(program)), tuple(_stage(program, stage) for stage in own))


def _own_stages(program: Program) -> list[Stage]:
    """Return the stages of this rank; all of them where process groups are gone that would tell."""
    if program.mesh is not None and not dist.is_initialized():
        return list(program.stages)
    return [stage for stage in program.stages if program.rank_of(stage.index) == program.axis_rank("pp")]


def _facts(program: Program) -> Facts:
    ties = [f"{' = '.join(tie.names)} of stages {', '.join(map(str, tie.stages))}" for tie in program.ties]
    return (("ranks", mesh_text(program.mesh)), ("tied", join_first(map(printable, ties))))


def _stage(program: Program, stage: Stage) -> Tree:
    if len(program.stages) == 1:
        return _tree(stage.module, program)
    facts = (
        ("runs", join_first(map(printable, stage.paths), 8)),
        ("receives", join_first(map(_boundary, stage.inputs), 8)),
        ("from the batch", join_first(map(printable, stage.batch_inputs), 8)),
    )
    tree = _tree(stage.module, program)
    knows = program.mesh is not None and dist.is_initialized()
    rank = f" on rank {program.rank_of(stage.index)} along pp" if knows else ""
    return Tree(tree.root, f"stage {stage.index}{rank}", (*facts, *tree.facts))


def _tree(module: nn.Module, program: Program | None) -> Tree:
    root = TreeBuilder(tied_names(module), None, program).node(module)
    return Tree(root, "", (("parameters", parameter_text(root, module)),))


def _boundary(boundary: Boundary) -> str:
    gradient = "" if boundary.requires_grad else " without gradient"
    return f"{printable(boundary.name)} {list(boundary.shape)} {short_value(boundary.dtype)}{gradient}"


def _non_default_options(options: Any) -> str:
    if not dataclasses.is_dataclass(options):
        return ""
    given = [(field, getattr(options, field.name)) for field in dataclasses.fields(options)]
    return ", ".join(f"{field.name}={short_value(value)}" for field, value in given if _is_changed(value, _default(field)))


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _is_changed(value: Any, default: Any) -> bool:
    return value is not default and not (isinstance(default, (bool, int, float, str)) and bool(value == default))


def _optimizer(optimizer: Any) -> str:
    if optimizer is None:
        return "none"
    groups: list[dict[str, Any]] = list(getattr(optimizer, "param_groups", ()))
    rates = sorted({float(group["lr"]) for group in groups if "lr" in group})
    number = sum(len(group.get("params", ())) for group in groups)
    held = f"{format_count(number, 'parameter')} in {format_count(len(groups), 'group')}" if number else ""
    return (
        f"{type(optimizer).__name__}: {held}{', ' if held else ''}lr {join_first(map(str, rates))}"
        if rates
        else type(optimizer).__name__
    )
