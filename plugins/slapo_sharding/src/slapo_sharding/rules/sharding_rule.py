"""Sharding rules: what it means to split a parameter of a module, per class of module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from slapo_core import ShardSpec

_CUT = "_slapo_cut"


@dataclass(frozen=True)
class Cut:
    """One way to split a module over the group.

    Args:
        dims: Parameter to the dimension that is split; those the module has are split together.
        input: What the module must be given: ``"replicated"`` (its gradient comes out partial), ``"sharded"``, or
            ``"indices"`` (replicated, and without a gradient). ``"whole"``, with that output too, is for modules that run
            from graphs, which add up results and gradients themselves; no rule has it.
        output: What the module then returns: ``"sharded"``, or ``"partial"``.
        attributes: Sizes that become local, those the module has.
        forward: Takes the place of the module's forward on more than one rank; ``forward(module, *args)``.
        late_bias: ``forward`` leaves out the module's bias, which the sync that reduces the output adds once; a module
            without a bias keeps its own forward.
        fusable: Whether the dimension may be made of fused blocks.
        dim: Dimension along which a sharded input or output is sharded, and which a late bias is added along; the last one by
            default, and -3 for images of ``[channels, height, width]``, with or without a batch before these.
        parts: Parameter to the number of equal blocks it is made of, each split for itself; the others are one block.
        uneven: Whether ranks may have parts of different sizes.
        divided: Sizes that the ranks have to divide, and that stay whole.
        draws: Whether ``forward`` draws random numbers for this rank's part, as dropout does.
        summed: Parameters that stay whole and of whose gradients each rank has a part.
        shown: Whether trials found the cut, see ``projections``.
    """

    dims: Mapping[str, int]
    input: Literal["replicated", "sharded", "indices", "whole"]
    output: Literal["sharded", "partial", "whole"]
    attributes: tuple[str, ...] = ()
    forward: Callable[..., Any] | None = None
    late_bias: bool = False
    fusable: bool = True
    dim: int = -1
    parts: Mapping[str, int] = field(default_factory=dict)
    uneven: bool = False
    divided: tuple[str, ...] = ()
    draws: bool = False
    summed: tuple[str, ...] = ()
    shown: bool = False

    def main(self, module: nn.Module) -> str:
        """The first of the parameters that ``module`` has; the others follow it."""
        return next(name for name in self.dims if tensor_of(module, name) is not None)


@dataclass(frozen=True)
class ShardingRule:
    """The cuts of a class of modules; plugins give theirs by the hook ``slapo_shard_rules``.

    Args:
        kind: What such a module is called in messages.
        matches: Whether a module is one. It has to be sure of the forward, not of the class alone: a subclass may compute
            something else.
        cuts: The ways to split it.
        refuse: Why a cut of this module would be wrong, or None.
    """

    kind: str
    matches: Callable[[nn.Module], bool]
    cuts: tuple[Cut, ...]
    refuse: Callable[[nn.Module, Cut], str | None] = lambda module, cut: None


@dataclass(frozen=True)
class AppliedCut:
    """Record of how a module was cut; it sits on the module. Over one rank nothing is changed but this record.

    Args:
        cut: The cut.
        spec: How its parameters were split; kept here too, as an engine may put others in their place.
        late_bias: Whether the reducing sync has to add the bias.
        asked: Parameters the user named; the others followed.
        gathered: Whether the output is put together again at once.
    """

    cut: Cut
    spec: ShardSpec
    late_bias: bool = False
    asked: tuple[str, ...] = ()
    gathered: bool = False

    @property
    def keeps_own(self) -> bool:
        """True if the module takes and returns whole values and its own tensors are whole too: only inner ones are cut."""
        return self.cut.input == self.cut.output == "whole" and all("." in name for name in self.cut.dims)

    def __deepcopy__(self, memo: dict[int, Any]) -> AppliedCut:
        return self


def computes_as(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether a module is of one of these classes, or of a subclass that keeps the forward."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


def tensor_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """The module's own parameter or buffer of this name; one that another is computed from has a path, see ``parametrized``."""
    module, name = holder_of(module, name)
    found = module._parameters.get(name)
    return found if found is not None else module._buffers.get(name)


def holder_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a tensor of a path below ``module``, and its name there."""
    path, _, own = name.rpartition(".")
    return (module.get_submodule(path) if path else module), own


def applied_cut(module: nn.Module) -> AppliedCut | None:
    """Return the record of how a module was cut, or None."""
    return module.__dict__.get(_CUT)


def split_of(module: nn.Module) -> AppliedCut | None:
    """Return the record of how a module was cut, if this rank has only a part of it."""
    applied = applied_cut(module)
    return applied if applied is not None and applied.spec.num_shards > 1 else None


def is_kept_for_inside(module: nn.Module, tensor: torch.Tensor) -> bool:
    """Return whether an uncut module only keeps this part of a tensor for a layer inside, as BERT's head does a bias."""
    return split_of(module) is None and any(
        split_of(inside) is not None and holds(inside, tensor) for inside in module.modules() if inside is not module
    )


def holds(module: nn.Module, tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter or buffer of the module's own, or of a child whose weights its forward uses."""
    applied = applied_cut(module)
    if applied is not None and applied.cut.shown:  # whatever it makes of what is inside, and where it puts that meanwhile
        return any(held is tensor for held in (*module.parameters(), *module.buffers()))
    below = [tensor_of(module, name) for name in (applied.cut.dims if applied is not None else ()) if "." in name]
    return any(held is tensor for held in [*module._parameters.values(), *module._buffers.values(), *below])


def record_cut(module: nn.Module, applied: AppliedCut) -> None:
    """Note on the module how it was cut."""
    module.__dict__[_CUT] = applied


class _AttributeOverride:
    """Stands for a module with other values of some attributes."""

    def __init__(self, module: nn.Module, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values, _slapo_module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_slapo_module"], name)


def with_attributes(module: nn.Module, values: Mapping[str, Any]) -> Any:
    """Return what a method of the module's class may take for the module: other values of some attributes."""
    return _AttributeOverride(module, values)


def forward_with(module: nn.Module, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call the forward of the module's class with other values of some attributes, its bias say; the module stays as it is."""
    return type(module).forward(_AttributeOverride(module, values), *args, **kwargs)
