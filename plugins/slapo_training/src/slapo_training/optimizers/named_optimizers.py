"""Optimizers of a rank one by one, with names of parameters; a composite has the state of its nested optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..model.named_tensors import Tensors
from .probe.introspection import named_optimizers_in
from .whole_tensor_optimizer import WholeTensorOptimizer


class NamedOptimizer(NamedTuple):
    """An optimizer of this rank with the names of its parameters.

    Args:
        optimizer: The optimizer; for whole tensors, the inner optimizer that steps them.
        known: All parameters of the rank by first original name, with stand-ins in the places of shards.
        elsewhere: Names of stand-ins that another rank steps.
        parts: The rank's parameters of sharded stand-ins, by name.
    """

    optimizer: torch.optim.Optimizer
    known: Tensors
    elsewhere: frozenset[str] = frozenset()
    parts: Tensors = {}

    def names(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of the parameters in the order of the ``state_dict``, and by groups."""
        names = {id(parameter): name for name, parameter in self.known.items()}
        groups = [[names[id(parameter)] for parameter in group["params"]] for group in self.optimizer.param_groups]
        return [name for group in groups for name in group], groups

    def own(self) -> Tensors:
        """Return the parameters that are stepped on this rank, by name."""
        return {name: self.known[name] for name in self.names()[0] if name not in self.elsewhere}

    def local(self, name: str) -> torch.Tensor:
        """Return this rank's local tensor of a parameter."""
        return self.parts.get(name, self.known[name])

    def loadable_state(self, name: str, elements: Mapping[Any, torch.Tensor], rest: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the state of a parameter for ``load_state_dict``: per-element state of its ``local`` tensor, and the rest."""
        if name not in self.parts:
            return {**elements, **rest}
        from .dtensors import step_state  # noqa: PLC0415  torch.distributed.tensor takes a second

        return step_state(self.known[name], elements, rest)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's own state and groups; a composite's ``state_dict`` may be of its nested optimizers."""
        found = self.optimizer.state_dict()
        if not {"state", "param_groups"} <= found.keys():
            found = torch.optim.Optimizer.state_dict(self.optimizer)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if {"state", "param_groups"} <= self.optimizer.state_dict().keys():
            self.optimizer.load_state_dict(state)
        else:
            torch.optim.Optimizer.load_state_dict(self.optimizer, state)


def named_optimizers(parameters: Tensors, optimizer: torch.optim.Optimizer | None) -> dict[str, NamedOptimizer]:
    """Return the rank's optimizer and its nested optimizers with their own state, by path."""
    if optimizer is None:
        return {}
    known, elsewhere, parts = parameters, frozenset[str](), Tensors()
    if isinstance(optimizer, WholeTensorOptimizer):
        optimizer.give_options()
        stand_ins, sources = optimizer.named_stand_ins(), optimizer.sources()
        known = {**{name: each for name, each in known.items() if id(each) not in sources}, **stand_ins}
        owned = optimizer.owned_ids()
        elsewhere = frozenset(name for name, each in stand_ins.items() if id(each) not in owned)
        parts = dict(optimizer.parts())
        optimizer = optimizer.inner
    found: dict[str, NamedOptimizer] = {}
    states: set[int] = set()
    for place, each in named_optimizers_in(optimizer).items():
        if id(each.state) not in states:  # a wrapper may share the state of its inner optimizer
            found[place] = NamedOptimizer(each, known, elsewhere, parts)
        states.add(id(each.state))
    return found
