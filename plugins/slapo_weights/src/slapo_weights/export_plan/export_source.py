"""Source of an export: the pieces of an engine, or of a schedule without one, and the ranks that hold the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from slapo_core import BuildError, Engine, PlainEngine, Program, Schedule, is_sharded, parameter_facts, shard_spec
from slapo_training.model import Piece, buffers, parameters, piece_of

from ..tensor_views.fused_parameters import FusedParts, fused_parts

Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class ExportSource:
    """Source of the weights of an export.

    Args:
        model: The whole scheduled model; tensors of other ranks may be on the meta device.
        trees: All modules that hold its tensors, including stages.
        group: Process group of its ranks if they have no mesh.
    """

    model: nn.Module
    trees: tuple[nn.Module, ...]
    own: nn.Module
    engine: Engine | None = None
    mesh: DeviceMesh | None = None
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, given: Any) -> ExportSource:
        """Return the source for a user's argument.

        Raises:
            BuildError: it is neither an engine nor a schedule, or does not tell which ranks have the other shards.
        """
        if isinstance(given, Schedule):
            if given.target is not None:
                raise BuildError(
                    f"export_weights: the schedule was built for {given.target!r}; give the engine that build returned"
                )
            mesh = given.mesh
            return cls(given.root_module, (given.root_module,), given.root_module, None, mesh, None if mesh else given.group)
        if isinstance(given, PlainEngine):
            if any(is_sharded(each) or each.is_meta for each in given.module.parameters()):
                raise BuildError("export_weights: other ranks have parts of this plain module; give the schedule instead")
            return cls(given.module, (given.module,), given.module)
        program = getattr(given, "program", None) or getattr(given, "_program", None)
        if not (isinstance(given, Engine) and isinstance(program, Program) and hasattr(given, "pieces")):
            kind = type(given).__name__
            raise BuildError(f"export_weights: cannot export a {kind}; give a schedule, or an engine that has pieces()")
        trees = (program.module, *(stage.module for stage in program.stages))
        return cls(
            program.module, trees, given.module, given, program.mesh, None if program.mesh else _group_of(program.module)
        )

    def pieces(self) -> dict[str, Piece]:
        """Return this rank's piece of each tensor. Collective if the engine has to gather."""
        if self.engine is not None:
            found: dict[str, Piece] = self.engine.pieces()  # type: ignore[attr-defined]
            return found
        tensors = {**parameters(self.model), **buffers(self.model)}
        return {name: piece_of(each, shard_spec(each)) for name, each in tensors.items() if not each.is_meta}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes in which this rank runs its tensors, by the names of pieces."""
        return {(parameter_facts(tensor).names or (name,))[0]: tensor.dtype for name, tensor in _named_tensors((self.own,))}

    def names(self) -> Names:
        """Return all names of each tensor in the unmodified model, by the first."""
        return {names[0]: names for _, tensor in _named_tensors(self.trees) if (names := parameter_facts(tensor).names)}

    def added_parameters(self) -> Names:
        """Return all present names of the parameters that a step added, by the first."""
        found: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if not parameter_facts(parameter).names:
                found.setdefault(id(parameter), []).append(name)
        return {names[0]: tuple(names) for names in found.values()}

    def made_of(self) -> dict[str, FusedParts]:
        """Return the declared parts (``made_of``) of tensors, by the names of their pieces."""
        return {
            (parameter_facts(tensor).names or (name,))[0]: made
            for name, tensor in _named_tensors(self.trees)
            if (made := fused_parts(tensor)) is not None
        }

    def order(self) -> Iterator[tuple[str, bool]]:
        """Yield the first name of each tensor in the order of ``state_dict``, and whether it is a buffer."""
        for path, module in self.model.named_modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        names = parameter_facts(tensor).names or (f"{path}.{name}" if path else name,)
                        yield names[0], table is module._buffers


def _group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the process group of a schedule without a mesh: the one of its shards, else that of all ranks."""
    groups = [spec.group for each in model.parameters() if (spec := shard_spec(each)) is not None and spec.group is not None]
    return groups[0] if groups else dist.group.WORLD if dist.is_initialized() else None


def _named_tensors(trees: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for tree in trees:
        yield from tree.named_parameters()
        yield from tree.named_buffers()
