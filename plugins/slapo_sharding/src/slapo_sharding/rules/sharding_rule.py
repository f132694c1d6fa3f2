"""Sharding rules: the ways to split the parameters of a module, per module class."""

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
        dims: Parameter to the dimension that is split; the parameters that the module has are split together.
        input: Layout of the module's input: ``"replicated"`` (its gradient is then partial), ``"sharded"``, or ``"indices"``
            (replicated, without a gradient). ``"whole"``, for input and output, is for modules that run from graphs and reduce
            results and gradients themselves; no rule has it.
        output: Layout of the module's output: ``"sharded"`` or ``"partial"``.
        attributes: Sizes that become local, if the module has them.
        forward: Replaces the module's forward on more than one rank; ``forward(module, *args)``.
        late_bias: ``forward`` omits the module's bias, which the sync that reduces the output adds once. A module without a
            bias keeps its own forward.
        fusable: True if the dimension may consist of fused blocks.
        dim: Dimension along which a sharded input or output is sharded, and along which a late bias is added. The last one by
            default; -3 for images of ``[channels, height, width]``, with or without a batch dimension.
        parts: Parameter to the number of equal blocks that it consists of, each of which is split; the others are one block.
        uneven: True if ranks may have shards of different sizes.
        divided: Sizes that the ranks must divide, and that stay as they are.
        draws: True if ``forward`` draws random numbers for this rank's shard, as dropout does.
        summed: Parameters that stay replicated and whose gradients are partial.
        shown: True if a numeric probe found the cut, see ``projections``.
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

    def main_parameter(self, module: nn.Module) -> str:
        """Return the first of these parameters that ``module`` has; the others are split with it."""
        return next(name for name in self.dims if tensor_of(module, name) is not None)


@dataclass(frozen=True)
class ShardingRule:
    """Cuts of a class of modules; plugins return theirs from the hook ``slapo_shard_rules``.

    Args:
        kind: Name of such a module in messages.
        matches: Returns whether a module is one. It must be sure of the forward, not only of the class, because a subclass may
            compute something else.
        cuts: The ways to split it.
        refuse: Returns why a cut of this module would be wrong, or None.
    """

    kind: str
    matches: Callable[[nn.Module], bool]
    cuts: tuple[Cut, ...]
    refuse: Callable[[nn.Module, Cut], str | None] = lambda module, cut: None


@dataclass(frozen=True)
class AppliedCut:
    """Record of how a module was split, kept on the module. On one rank only this record changes.

    Args:
        cut: The cut.
        spec: Shard of its parameters; kept here too, because an engine may replace the parameters.
        late_bias: True if the reducing sync has to add the bias.
        asked: Parameters that the user named; the others were split with them.
        gathered: True if the output is gathered at once.
    """

    cut: Cut
    spec: ShardSpec
    late_bias: bool = False
    asked: tuple[str, ...] = ()
    gathered: bool = False

    @property
    def returns_shard(self) -> bool:
        """True if the module's output is sharded, and not gathered at once."""
        return self.cut.output == "sharded" and not self.gathered

    @property
    def keeps_own(self) -> bool:
        """True if the module takes and returns replicated values, and only tensors of modules inside it are split."""
        return self.cut.input == self.cut.output == "whole" and all("." in name for name in self.cut.dims)

    def __deepcopy__(self, memo: dict[int, Any]) -> AppliedCut:
        return self


def computes_as(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether a module is of one of these classes, or of a subclass that keeps the forward."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


def tensor_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the module's parameter or buffer of this name, or of this path below it (see ``parametrizations``), or None."""
    module, name = holder_of(module, name)
    found = module._parameters.get(name)
    return found if found is not None else module._buffers.get(name)


def holder_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a tensor of a path below ``module``, and its name there."""
    path, _, own = name.rpartition(".")
    return (module.get_submodule(path) if path else module), own


def applied_cut(module: nn.Module) -> AppliedCut | None:
    """Return the record of how a module was split, or None."""
    return module.__dict__.get(_CUT)


def split_of(module: nn.Module) -> AppliedCut | None:
    """Return the record of how a module was split if there are several ranks, else None."""
    applied = applied_cut(module)
    return applied if applied is not None and applied.spec.num_shards > 1 else None


def returns_shard(module: nn.Module) -> bool:
    """Return whether a module is split over several ranks and its output is sharded, and not gathered at once."""
    applied = split_of(module)
    return applied is not None and applied.returns_shard


def is_kept_for_inside(module: nn.Module, tensor: torch.Tensor) -> bool:
    """Return whether an unsplit module holds this shard only for a layer inside, as BERT's head holds a bias."""
    return split_of(module) is None and any(
        split_of(inside) is not None and holds_tensor(inside, tensor) for inside in module.modules() if inside is not module
    )


def holds_tensor(module: nn.Module, tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the module's own, or a child's whose weights the module's forward uses."""
    applied = applied_cut(module)
    if applied is not None and applied.cut.shown:  # its forward may use any tensor inside, and may move one while it runs
        return any(held is tensor for held in (*module.parameters(), *module.buffers()))
    below = [tensor_of(module, name) for name in (applied.cut.dims if applied is not None else ()) if "." in name]
    return any(held is tensor for held in [*module._parameters.values(), *module._buffers.values(), *below])


def record_cut(module: nn.Module, applied: AppliedCut) -> None:
    """Keep on the module the record of how it was split."""
    module.__dict__[_CUT] = applied


class AttributeOverride:
    """Stand-in for a module with other values of some attributes, for methods of its class."""

    def __init__(self, module: nn.Module, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values, _slapo_module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_slapo_module"], name)


def forward_with(module: nn.Module, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call the forward of the module's class with other values of some attributes; the module does not change."""
    return type(module).forward(AttributeOverride(module, values), *args, **kwargs)
