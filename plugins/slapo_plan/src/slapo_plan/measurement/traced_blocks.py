"""Runs of equal blocks in the graph of a traced module, which calls its blocks by name."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from slapo_tracing.nodes import module_signature

Place = int | str
"""Position or name of an argument."""


class PassThrough(nn.Module):
    """Stands for a block that is not measured: returns the value that the block would change.

    Args:
        place: The argument that it returns.
        is_tuple: True to return a tuple of that value.
    """

    def __init__(self, place: Place, is_tuple: bool) -> None:
        super().__init__()
        self._place, self._is_tuple = place, is_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the argument."""
        value: torch.Tensor = args[self._place] if isinstance(self._place, int) else kwargs[self._place]
        return (value,) if self._is_tuple else value


def block_chains(graph: fx.Graph, root: nn.Module) -> Iterator[tuple[list[str], PassThrough]]:
    """Yield paths of consecutive calls of equal modules, each on the result of the one before, and what can stand for one.

    Args:
        graph: Graph of ``root``.
        root: A module with the graph's targets.
    """
    calls = [node for node in graph.nodes if node.op == "call_module"]
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    once = [node for node in calls if sum(other.target == node.target for other in calls) == 1]
    at = 0
    while at < len(once):
        chain, place, is_tuple = [once[at]], None, False
        while at + len(chain) < len(once) and (link := _link(chain[-1], once[at + len(chain)])) is not None:
            new = once[at + len(chain)]
            if place not in (None, link[0]) or (place is not None and is_tuple != link[1]):
                break
            if not _are_equal(root, str(chain[0].target), str(new.target)):
                break
            place, is_tuple = link
            chain.append(new)
        paths = [str(node.target) for node in chain]
        if place is not None and not any(f"{each}.".startswith(f"{path}.") for each in read for path in paths):
            yield paths, PassThrough(place, is_tuple)
        at += len(chain)


def _link(before: fx.Node, node: fx.Node) -> tuple[Place, bool] | None:
    """Return the argument by which a call gets the result of the call before, and whether that is in a tuple.

    None if other nodes get it too, or if the two calls differ in another argument.
    """
    value, is_tuple = before, False
    users = [*before.users]
    if len(users) == 1 and users[0].target is operator.getitem and users[0].args[1] == 0:
        value, is_tuple = users[0], True
    if [*value.users] != [node]:
        return None
    given: list[tuple[Place, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    own: dict[Place, Any] = dict([*enumerate(before.args), *before.kwargs.items()])
    places = [place for place, each in given if each is value]
    if len(places) != 1 or own.keys() != dict(given).keys():
        return None
    if any(each != own[place] for place, each in given if place != places[0]):
        return None
    return places[0], is_tuple


def _are_equal(root: nn.Module, path: str, other: str) -> bool:
    return module_signature(root.get_submodule(path)) == module_signature(root.get_submodule(other))
