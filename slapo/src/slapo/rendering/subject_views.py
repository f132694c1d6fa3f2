"""The views of a schedule, of a program with all of its stages, and of an engine with those of this rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slapo_core import Boundary, Engine, Program, Schedule, ScheduleError, Stage, Step

from .module_tree import ModuleNode, TreeBuilder, tied_names
from .short_values import format_count, format_tally, join_first, printable, short_value
from .step_places import StepPlaces, is_inside
from .view import Facts, Tree, View


def view_of_schedule(sch: Schedule) -> View:
    """Return the view of a schedule, of its module and those inside."""
    steps = [step for step in sch.journal if is_inside(step.path, sch.path)]
    try:
        module = sch.mod
    except ScheduleError as gone:
        return View(printable(str(gone)), (("steps", step_text(steps)),))
    places, names = StepPlaces(sch.journal), tied_names(sch.root_module)
    root = TreeBuilder(names, places, sch.program).node(module, sch.path)
    where = f" at {printable(sch.path)}" if sch.path else ""
    facts = (
        ("parameters", parameter_text(root, module)),
        ("ranks", _ranks(sch)),
        ("steps", step_text(steps)),
        ("stages", _stages(sch, places)),
        ("tied", join_first(_ties(names.values(), sch.path), 3)),
        ("gone modules", join_first(_removed_modules(sch, places))),
    )
    return View(f"{root.kind}{where}", facts, (Tree(root),))


def parameter_text(root: ModuleNode, module: nn.Module) -> str:
    """Return number, type and device of the parameters inside a module."""
    found = {(parameter.dtype, parameter.device): None for parameter in module.parameters()}
    kinds = [f"{short_value(dtype)} on {device}" for dtype, device in found]
    held = "" if root.held == root.total else f", of which {root.held:,} on this rank"
    return f"{root.total:,}{held}; {join_first(kinds)}" if kinds else "none"


def step_text(steps: Iterable[Step]) -> str:
    """Return the number of steps and of each primitive."""
    names = [step.name for step in steps]
    return format_tally(names) if len(set(names)) == 1 else f"{len(names):,}: {format_tally(names)}" if names else "none"


def mesh_text(mesh: DeviceMesh | None) -> str:
    """Return axes and sizes of a mesh, and this rank's place in it."""
    if mesh is None:
        return ""
    names, place = mesh.mesh_dim_names or ("",), mesh.get_coordinate()
    axes = " x ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))
    here = ", ".join(f"{name} {at}" for name, at in zip(names, place or (), strict=False))
    rank = f"; this is rank {dist.get_rank()} ({here})" if dist.is_initialized() else ""
    return f"mesh {axes} on {mesh.device_type}{rank}"


def _ranks(sch: Schedule) -> str:
    if sch.mesh is not None:
        return mesh_text(sch.mesh)
    return f"a group of {format_count(sch.world_size, 'rank')}; this is rank {sch.rank} of it" if sch.group is not None else ""


def _stages(sch: Schedule, places: StepPlaces) -> str:
    if sch.program is not None:
        return f"{len(sch.program.stages)}, as built"
    cuts = sum(map(len, places.borders.values()))
    return f"{cuts + 1}, when it is built" if cuts else ""


def _ties(names: Iterable[tuple[str, ...]], top: str) -> list[str]:
    inside = [tied for tied in names if any(is_inside(name, top) for name in tied)]
    return [printable(" = ".join(tied)) for tied in inside]


def _removed_modules(sch: Schedule, places: StepPlaces) -> list[str]:
    """Return the steps on modules that later steps removed or replaced."""
    root = sch.get_top_schedule()
    removed = {path: names for path, names in places.names.items() if path and path not in root}
    gone = {path: places.replaced.get(path, []) + removed.get(path, []) for path in {**places.replaced, **removed}}
    return [f"{printable(path) or 'the model'}: {format_tally(names)}" for path, names in gone.items()]


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
    name = type(optimizer).__name__
    return f"{name}: {held}{', ' if held else ''}lr {join_first(map(str, rates))}" if rates else name
