"""The view of a schedule: its module tree, what was done where, and on which ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slapo_core import Schedule, ScheduleError, Step

from .module_tree import ModuleNode, TreeBuilder, tied_names
from .short_values import format_count, format_tally, join_first, printable, short_value
from .step_places import CUTS, StepPlaces
from .view import Tree, View


def view_of_schedule(sch: Schedule) -> View:
    """Return the view of a schedule, of its module and those inside."""
    steps = [step for step in sch.journal if _is_inside(step.path, sch.path)]
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
    cuts = sum(names.count(CUTS) for names in places.names.values())
    return f"{cuts + 1}, when it is built" if cuts else ""


def _ties(names: Iterable[tuple[str, ...]], top: str) -> list[str]:
    inside = [tied for tied in names if any(_is_inside(name, top) for name in tied)]
    return [printable(" = ".join(tied)) for tied in inside]


def _removed_modules(sch: Schedule, places: StepPlaces) -> list[str]:
    """Return the steps on modules that later steps removed."""
    root = sch.get_top_schedule()
    return [f"{printable(path)}: {format_tally(names)}" for path, names in places.names.items() if path and path not in root]


def _is_inside(path: str, top: str) -> bool:
    return not top or path == top or path.startswith(f"{top}.")
