"""What the syncs of one module make of one value, one after the other: each has to find it laid out as it needs."""

from __future__ import annotations

from typing import Literal

from torch import nn

from slapo_core import BuildError

from ..rules.sharding_rule import AppliedCut
from .sync_hooks import syncs_of

GATHERING_OPS = ("all_gather", "all_to_all")
"""Operations that put parts together."""


def off_switch(check: str) -> str:
    """Return the clause that ends the errors of the check of this name."""
    return f"check=False turns this check off with all others, SLAPO_DISABLE_CHECKS={check} alone"


OFF_SWITCH = off_switch("syncs")

_State = Literal["whole", "sharded", "partial"]
_NEEDS: dict[str, _State] = {
    "all_gather": "sharded",
    "all_to_all": "sharded",
    "scatter": "whole",
    "all_reduce": "partial",
    "reduce_scatter": "partial",
}
_MAKES: dict[str, _State] = {
    "all_gather": "whole",
    "all_to_all": "sharded",
    "scatter": "sharded",
    "all_reduce": "whole",
    "reduce_scatter": "sharded",
}


def check_sync_order(name: str, module: nn.Module, applied: AppliedCut | None) -> None:
    """Follow the input and the output of a module through its syncs.

    Args:
        name: What the module is called in messages.
        module: It, with its hooks.
        applied: How it was split, None if this rank has all of it.

    Raises:
        BuildError: a sync is given what it cannot work on, or the module what it was not split for.
    """
    _state_after_syncs(name, module, "fwd_post", applied.cut.output if applied is not None else None)
    given = _state_after_syncs(name, module, "fwd_pre", None)
    if applied is None or given is None or applied.cut.input == "indices":
        return
    taken: _State = "sharded" if applied.cut.input == "sharded" else "whole"
    if given != taken:
        raise BuildError(
            f"{name}: its input is {given} after its syncs, and it takes one that is {taken}; leave them out; {OFF_SWITCH}"
        )


def _state_after_syncs(name: str, module: nn.Module, mode: str, state: _State | None) -> _State | None:
    """What the value is at last; None where that cannot be known."""
    side, last = "output" if mode == "fwd_post" else "input", ""
    for sync in syncs_of(module, mode):
        needed = _NEEDS.get(sync.op)
        if None not in (state, needed) and state != needed:
            remedy = "sync it once" if sync.op == last else "leave one of them out" if last else "leave it out, or make it so"
            after = f" after {last}" if last else ""
            wrong = f"its {side} is {state}{after}, and sync({mode!r}, {sync.op!r}) needs it {needed}"
            raise BuildError(f"{name}: {wrong}; {remedy}; {OFF_SWITCH}")
        state, last = _MAKES.get(sync.op), sync.op
    return state
