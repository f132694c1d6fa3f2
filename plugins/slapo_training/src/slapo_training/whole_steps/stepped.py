"""The optimizers of a rank one by one: a composite's state is that of those that it holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..model_tensors import Tensors
from .optimizer import WholeTensorOptimizer
from .tree import named_optimizers_in


class Stepped(NamedTuple):
    """One optimizer of this rank and what it steps.

    Args:
        optimizer: It, with whole tensors where it steps these.
        known: All parameters of the rank by the first of their original names; stand-ins in the places of parts.
        elsewhere: Names of those that another rank steps.
    """

    optimizer: torch.optim.Optimizer
    known: Tensors
    elsewhere: frozenset[str] = frozenset()

    def names(self) -> tuple[list[str], list[list[str]]]:
        """Return names in the order in which the optimizer counts its parameters, and by its groups."""
        names = {id(parameter): name for name, parameter in self.known.items()}
        groups = [[names[id(parameter)] for parameter in group["params"]] for group in self.optimizer.param_groups]
        return [name for group in groups for name in group], groups

    def own(self) -> Tensors:
        """Return what the optimizer steps on this rank, by name."""
        return {name: self.known[name] for name in self.names()[0] if name not in self.elsewhere}

    def state_dict(self) -> dict[str, Any]:
        """Return its own state and groups; a composite may give all of those that it holds instead."""
        found = self.optimizer.state_dict()
        if not {"state", "param_groups"} <= found.keys():
            found = torch.optim.Optimizer.state_dict(self.optimizer)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what ``state_dict`` gave."""
        if {"state", "param_groups"} <= self.optimizer.state_dict().keys():
            self.optimizer.load_state_dict(state)
        else:
            torch.optim.Optimizer.load_state_dict(self.optimizer, state)


def stepped_by(parameters: Tensors, optimizer: torch.optim.Optimizer | None) -> dict[str, Stepped]:
    """Return the rank's optimizer, and all that it holds with a state of their own, by their places in it.

    Args:
        parameters: This rank's, by the first of their original names, as the optimizer steps those that the rank has whole.
        optimizer: This rank's, or None.
    """
    if optimizer is None:
        return {}
    known, elsewhere = parameters, frozenset[str]()
    if isinstance(optimizer, WholeTensorOptimizer):
        stand_ins, sources = optimizer.stepped(), optimizer.sources()
        known = {**{name: each for name, each in known.items() if id(each) not in sources}, **stand_ins}
        owned = optimizer.owned()
        elsewhere = frozenset(name for name, each in stand_ins.items() if id(each) not in owned)
        optimizer = optimizer.inner
    found: dict[str, Stepped] = {}
    states: set[int] = set()
    for place, each in named_optimizers_in(optimizer).items():
        if id(each.state) not in states:  # a wrapper may share the state of what it wraps
            found[place] = Stepped(each, known, elsewhere)
        states.add(id(each.state))
    return found
