"""Units of parameters that FSDP2 gathers and reduces together: one per repeated layer, and one for all other parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from slapo_core import BuildError, Program, UnknownNameError, paths, shard_spec
from slapo_training.model import is_wrapper_subclass


def unit_paths(root: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Return the paths of the units in the order of the model.

    ``patterns`` are globs as in ``Schedule.select``; None stands for the elements of lists of layers of one class.

    Raises:
        BuildError: a pattern matches nothing, or a unit is inside another one.
    """
    if patterns is None:
        return list(_layers(root, ""))
    found: set[str] = set()
    for pattern in patterns:
        matching = [path for path, _ in paths.select(root, pattern)]
        if not matching:
            names = [path for path, _ in root.named_modules() if path]
            raise BuildError(str(UnknownNameError.of("module for fsdp_units", pattern, names)))
        found |= set(matching)
    for path in sorted(found):
        inside = next((other for other in sorted(found) if path.startswith(f"{other}.")), None)
        if inside is not None:
            raise BuildError(f"fsdp_units: {path!r} is inside of the unit {inside!r}; give one of them")
    return [path for path, _ in root.named_modules() if path in found]


def _layers(module: nn.Module, path: str, in_list: bool = False) -> Iterator[str]:
    children = {name: child for name, child in module._modules.items() if child is not None}
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and (in_list or _repeats_a_class(module)):
        for name, child in children.items():
            if _has_no_forward(child):  # a layer that is a list of its parts has no forward; its parts run
                yield from _layers(child, paths.join(path, name), in_list=True)
            else:
                yield paths.join(path, name)
    else:
        for name, child in children.items():
            yield from _layers(child, paths.join(path, name))


def _repeats_a_class(module: nn.Module) -> bool:
    kinds = [type(child) for child in module.children() if next(child.parameters(), None) is not None]
    if isinstance(module, nn.ModuleDict) and len(set(kinds)) > 1:
        # the parts of a model by name: token and position tables are not layers, and a tied head may read one
        kinds = [kind for kind in kinds if not issubclass(kind, nn.Embedding)]
    return any(kinds.count(kind) > 1 for kind in kinds)


def _has_no_forward(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward


def assign_parameters(root: nn.Module, unit_roots: Sequence[str], held: Collection[int]) -> dict[str, list[nn.Parameter]]:
    """Return this rank's ``held`` parameters of each unit; under ``""`` those of no unit and those of several units."""
    users: dict[int, set[str]] = defaultdict(set)
    units = {
        paths.join(path, name): path
        for path in unit_roots
        for name, _ in root.get_submodule(path).named_parameters("", True, False)
    }
    named = dict(root.named_parameters(remove_duplicate=False))
    for name, parameter in named.items():
        users[id(parameter)].add(units.get(name, ""))
    assigned: dict[str, list[nn.Parameter]] = {path: [] for path in [*unit_roots, ""]}
    for parameter in {id(parameter): parameter for parameter in named.values()}.values():
        if id(parameter) in held:
            using = users[id(parameter)]
            assigned[next(iter(using)) if len(using) == 1 else ""].append(parameter)
    return {path: parameters for path, parameters in assigned.items() if parameters}


def can_shard(parameter: torch.Tensor) -> bool:
    """Return True if FSDP2 can shard a tensor: it has rows and is floating-point, as only such gradients are reduced.

    Wrapper subclasses such as quantised weights stay whole: only their class knows whether rows can be taken.
    """
    has_rows = parameter.dim() > 0 and parameter.numel() > 0 and not is_empty_on_a_rank(parameter)
    return has_rows and parameter.is_floating_point() and not is_wrapper_subclass(parameter)


def is_empty_on_a_rank(parameter: torch.Tensor) -> bool:
    """Return True if some tensor-parallel rank holds no element of a parameter, e.g. of a branch that another rank runs."""
    spec = shard_spec(parameter)
    return spec is not None and not all(spec.sizes)


def check_shardable(program: Program, patterns: Sequence[str] | None) -> None:
    """Refuse programs that FSDP cannot shard over replicas.

    Raises:
        BuildError: units that do not exist; parameters that are DTensors; or uneven shards along another dimension than 0.
    """
    unit_paths(program.module, patterns)
    for name, parameter in program.module.named_parameters():
        if hasattr(parameter, "placements"):
            raise BuildError(f"{name!r} is a DTensor; leave the sharding over replicas to data_parallel='fsdp'")
    for name, spec in program.shard_specs.items():
        if spec.dim and len(set(spec.sizes)) > 1:
            raise BuildError(
                f"{name!r} is dealt out unevenly along dim {spec.dim}, and data_parallel='fsdp' cannot share that out any "
                "further; shard it in equal parts, or use data_parallel='ddp'"
            )
