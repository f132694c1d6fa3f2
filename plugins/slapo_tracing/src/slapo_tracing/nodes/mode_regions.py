"""Gradient mode and autocast in a graph.

During a trace, every node gets ``meta["regions"]``: the differences from the state in which the forward was called.
``write_mode_nodes`` writes nodes ``enter(state)`` and ``leave_modes(token)`` around each run of nodes of one state. Code that
builds a graph from copied nodes (with their ``meta``) leaves these nodes out and calls ``write_mode_nodes`` on the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

ModeState = tuple[Any, ...]
"""``("grad", enabled)`` and ``(device type, enabled, dtype)`` entries; empty in the caller's own state."""

_DEVICES = ("cpu", "cuda")


def current_modes(baseline: ModeState = (), grad: bool = False) -> ModeState:
    """Return the present state without the entries of ``baseline``; with ``grad``, the gradient mode is always included."""
    autocast = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
    mode = ("grad", torch.is_grad_enabled())
    return tuple(entry for entry in (mode, *autocast) if entry not in baseline or (grad and entry is mode))


def autocast_state() -> ModeState:
    """Return the active autocast, by device type and dtype. A forward may depend on it, so a graph serves one state."""
    return tuple((device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device))


def enter(state: ModeState) -> ModeState:
    """Set the state, and return the token with which ``leave_modes`` restores the state before."""
    before = current_modes()
    leave_modes(state)
    return before


def leave_modes(before: ModeState) -> None:
    """Restore the state before ``enter``."""
    for kind, enabled, *dtype in before:
        if kind == "grad":
            torch.set_grad_enabled(enabled)
        else:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, *dtype)
            if not enabled:
                torch.clear_autocast_cache()


def is_mode_node(node: fx.Node) -> bool:
    """Return True if the node only switches the state."""
    return node.op == "call_function" and node.target in (enter, leave_modes)


def write_mode_nodes(graph: fx.Graph) -> None:
    """Insert ``enter`` and ``leave_modes`` nodes where the state of the nodes changes; existing ones are replaced."""
    for node in [node for node in graph.nodes if is_mode_node(node)][::-1]:
        graph.erase_node(node)
    state: ModeState = ()
    token: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr"):
            continue
        wanted = () if node.op == "output" else node.meta.get("regions", ())
        if wanted != state:
            with graph.inserting_before(node):
                if token is not None:
                    graph.call_function(leave_modes, (token,))
                token = graph.call_function(enter, (wanted,)) if wanted else None
            state = wanted
