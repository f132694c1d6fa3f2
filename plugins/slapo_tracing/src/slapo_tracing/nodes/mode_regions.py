"""Gradient mode and autocast in a graph.

While tracing, every node gets ``meta["regions"]``: what differs from the state the forward was called in. ``write_mode_nodes``
turns that into nodes ``enter(state)`` / ``leave(token)`` around each run of nodes of one state. Who builds a graph out of
copied nodes (with their ``meta``) leaves these nodes out and calls ``write_mode_nodes`` on the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

ModeState = tuple[Any, ...]
"""``("grad", enabled)`` and ``(device type, enabled, dtype)`` entries; empty in the caller's own state."""

_DEVICES = ("cpu", "cuda")


def current_modes(baseline: ModeState = (), grad: bool = False) -> ModeState:
    """The state now, without the entries that ``baseline`` has too; with ``grad`` the gradient mode is one in any case."""
    autocast = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
    mode = ("grad", torch.is_grad_enabled())
    return tuple(entry for entry in (mode, *autocast) if entry not in baseline or (grad and entry is mode))


def autocast_state() -> ModeState:
    """Which autocast is on: a forward's Python code may ask, so a graph is good for one answer."""
    return tuple((device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device))


def enter(state: ModeState) -> ModeState:
    """Set the state; returns what ``leave_modes`` needs to go back."""
    before = current_modes()
    leave_modes(state)
    return before


def leave_modes(before: ModeState) -> None:
    """Go back to the state before ``enter``."""
    for kind, enabled, *dtype in before:
        if kind == "grad":
            torch.set_grad_enabled(enabled)
        else:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, *dtype)
            if not enabled:
                torch.clear_autocast_cache()


def is_mode_node(node: fx.Node) -> bool:
    """Whether the node only switches the state."""
    return node.op == "call_function" and node.target in (enter, leave_modes)


def write_mode_nodes(graph: fx.Graph) -> None:
    """Put ``enter`` and ``leave_modes`` nodes where the nodes' states change; existing ones are replaced."""
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
