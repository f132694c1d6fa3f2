"""Sharding rules: what it means to split a parameter of a module, per class of module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from slapo_core.parameters import ShardSpec

_CUT = "_slapo_cut"


@dataclass(frozen=True)
class Cut:
    """One way to split a module over the group.

    Args:
        dims: Parameter to the dimension that is split; those the module has are split together.
        input: What the module must be given: ``"replicated"`` (its gradient comes out partial), ``"sharded"``, or
            ``"indices"`` (replicated, and without a gradient).
        output: What the module then returns: ``"sharded"`` along the last dimension, or ``"partial"``.
        attributes: Sizes that become local.
        forward: Takes the place of the module's forward on more than one rank; ``forward(module, *args)``.
        late_bias: ``forward`` leaves out the module's bias, which the sync that reduces the output adds once; a module
            without a bias keeps its own forward.
        fusable: Whether the dimension may be made of fused blocks.
    """

    dims: Mapping[str, int]
    input: Literal["replicated", "sharded", "indices"]
    output: Literal["sharded", "partial"]
    attributes: tuple[str, ...] = ()
    forward: Callable[..., Any] | None = None
    late_bias: bool = False
    fusable: bool = True


@dataclass(frozen=True)
class ShardingRule:
    """The cuts of a class of modules.

    Args:
        kind: What such a module is called in messages.
        matches: Whether a module is one.
        cuts: The ways to split it.
        refuse: Why a cut of this module would be wrong, or None.
    """

    kind: str
    matches: Callable[[nn.Module], bool]
    cuts: tuple[Cut, ...]
    refuse: Callable[[nn.Module, Cut], str | None] = lambda module, cut: None


@dataclass(frozen=True)
class AppliedCut:
    """How a module was cut; it sits on the module. Over one rank nothing is changed but this record.

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
    asked: frozenset[str] = frozenset()
    gathered: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> AppliedCut:
        return self


_RULES: list[ShardingRule] = []


def add_rule(rule: ShardingRule) -> ShardingRule:
    """Register a rule; later ones are asked first."""
    _RULES.insert(0, rule)
    return rule


def find_rule(module: nn.Module) -> ShardingRule | None:
    """The rule for a module, or None."""
    return next((rule for rule in _RULES if rule.matches(module)), None)


def find_cut(module: nn.Module, name: str, dim: int) -> Cut:
    """The cut of ``module`` that splits parameter ``name`` along ``dim``.

    Raises:
        LookupError: no rule for such modules, no such cut, or the rule refuses it; its message continues "'name' ...".
    """
    rule = find_rule(module)
    if rule is None:
        kinds = ", ".join(rule.kind for rule in reversed(_RULES))
        raise LookupError(f"is in a {type(module).__name__}, which no sharding rule covers; there are rules for {kinds}")
    cut = next((cut for cut in rule.cuts if cut.dims.get(name) == dim), None)
    if cut is None:
        known = sorted({f"{name!r} along {dim}" for cut in rule.cuts for name, dim in cut.dims.items()})
        raise LookupError(f"of a {rule.kind} cannot be split along {dim}; it can split {', '.join(known)}")
    if reason := rule.refuse(module, cut):
        raise LookupError(f"cannot be split along {dim}: {reason}")
    return cut


def applied_cut(module: nn.Module) -> AppliedCut | None:
    """How a module was cut, or None."""
    return module.__dict__.get(_CUT)


def record_cut(module: nn.Module, applied: AppliedCut) -> None:
    """Note on the module how it was cut."""
    module.__dict__[_CUT] = applied
