"""Gradient mode and autocast in a graph.

While tracing, every node gets ``meta["regions"]``: what differs from the state the forward was called in. ``write_regions``
turns that into nodes ``enter(state)`` / ``leave(token)`` around each run of nodes of one state. Who builds a graph out of
copied nodes (with their ``meta``) leaves these nodes out and calls ``write_regions`` on the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

State = tuple[Any, ...]
"""``("grad", enabled)`` and ``(device type, enabled, dtype)`` entries; empty in the caller's own state."""

_DEVICES = ("cpu", "cuda")


def current(baseline: State = (), grad: bool = False) -> State:
    """The state now, without the entries that ``baseline`` has too; with ``grad`` the gradient mode is one in any case."""
    autocast = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
    mode = ("grad", torch.is_grad_enabled())
    return tuple(entry for entry in (mode, *autocast) if entry not in baseline or (grad and entry is mode))


def autocast_state() -> State:
    """Which autocast is on: a forward's Python code may ask, so a graph is good for one answer."""
    return tuple((device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device))


def enter(state: State) -> State:
    """Set the state; returns what ``leave`` needs to go back."""
    before = current()
    leave(state)
    return before


def leave(before: State) -> None:
    """Go back to the state before ``enter``."""
    for kind, enabled, *dtype in before:
        if kind == "grad":
            torch.set_grad_enabled(enabled)
        else:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, *dtype)
            if not enabled:
                torch.clear_autocast_cache()


def is_region_node(node: fx.Node) -> bool:
    """Whether the node only switches the state."""
    return node.op == "call_function" and node.target in (enter, leave)


def write_regions(graph: fx.Graph) -> None:
    """Put ``enter`` and ``leave`` nodes where the nodes' states change; existing ones are replaced."""
    for node in [node for node in graph.nodes if is_region_node(node)][::-1]:
        graph.erase_node(node)
    state: State = ()
    token: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr"):
            continue
        wanted = () if node.op == "output" else node.meta.get("regions", ())
        if wanted != state:
            with graph.inserting_before(node):
                if token is not None:
                    graph.call_function(leave, (token,))
                token = graph.call_function(enter, (wanted,)) if wanted else None
            state = wanted
