"""Check that each sync of a module gets its value in the layout that it needs from the syncs before."""

from __future__ import annotations

from typing import Literal

from torch import nn

from slapo_core import BuildError

from ..rules.sharding_rule import AppliedCut
from .sync_hooks import syncs_of

GATHERING_OPS = ("all_gather", "all_to_all")
"""Operations that join shards."""


def off_switch(check: str) -> str:
    """Return the clause that ends the errors of the check of this name."""
    return f"check=False turns this check off with all others, SLAPO_DISABLE_CHECKS={check} alone"


OFF_SWITCH = off_switch("syncs")

_State = Literal["whole", "sharded", "partial"]
_STATES: dict[str, tuple[_State, _State]] = {
    "all_gather": ("sharded", "whole"),
    "all_to_all": ("sharded", "sharded"),
    "scatter": ("whole", "sharded"),
    "all_reduce": ("partial", "whole"),
    "reduce_scatter": ("partial", "sharded"),
}
"""Operation to the layout that it needs, and the one that it makes."""


def check_sync_order(name: str, module: nn.Module, applied: AppliedCut | None) -> None:
    """Check the layouts of a module's input and output through its syncs.

    Raises:
        BuildError: a sync or the module gets another layout than it needs.
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
    """Return the layout after the syncs of a mode; None if unknown."""
    side, last = "output" if mode == "fwd_post" else "input", ""
    for sync in syncs_of(module, mode):
        needed, made = _STATES.get(sync.op, (None, None))
        if None not in (state, needed) and state != needed:
            remedy = "sync it once" if sync.op == last else "leave one of them out" if last else "leave it out, or make it so"
            after = f" after {last}" if last else ""
            wrong = f"its {side} is {state}{after}, and sync({mode!r}, {sync.op!r}) needs it {needed}"
            raise BuildError(f"{name}: {wrong}; {remedy}; {OFF_SWITCH}")
        state, last = made, sync.op
    return state
