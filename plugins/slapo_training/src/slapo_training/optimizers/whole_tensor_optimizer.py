"""Optimizer of a rank's parameters, around an inner optimizer that steps whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from .probe.introspection import Optimizer, groups_in, optimizers_in
from .whole_tensors.stand_ins import StandIns

Group = dict[str, Any]
_OWN = ("params", "param_names")


class GroupOptions:
    """Keeps the options of outer groups equal to those of an optimizer's groups.

    Args:
        inner: The optimizer; groups are known by index, since a load replaces them.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self.outer: list[Group] = []
        self._known: list[Group] = []

    def add(self, outer: Group) -> None:
        """Add an outer group, which takes the options of the optimizer's next group."""
        self.outer.append(outer)
        self._known.append({})
        self._take(len(self.outer) - 1)

    def exchange(self) -> None:
        """Copy options that changed since the last exchange; outer groups take precedence."""
        for number, outer in enumerate(self.outer):
            inner, known = self._inner.param_groups[number], self._known[number]
            for key in [*dict.fromkeys([*outer, *inner])]:
                if key in _OWN:
                    continue
                if key in outer and not _is_known(outer[key], known, key):
                    inner[key] = outer[key]
                elif key in inner:
                    outer[key] = inner[key]
            self._remember(number)

    def take_inner(self) -> None:
        """Copy the options of the optimizer's groups to the outer groups."""
        for number in range(len(self.outer)):
            self._take(number)

    def _take(self, number: int) -> None:
        inner = self._inner.param_groups[number]
        self.outer[number].update((key, value) for key, value in inner.items() if key not in _OWN)
        self._remember(number)

    def _remember(self, number: int) -> None:
        self._known[number] = {key: value for key, value in self._inner.param_groups[number].items() if key not in _OWN}


def _is_known(value: Any, known: Group, key: str) -> bool:
    if key not in known:
        return False
    before = known[key]
    if value is before:
        return True
    return type(value) is type(before) and isinstance(value, bool | int | float | str | tuple) and value == before


Extension = Callable[[Sequence[nn.Parameter]], tuple[list[nn.Parameter], Sequence[StandIns]]]


class WholeTensorOptimizer(torch.optim.Optimizer):
    """Optimizer whose inner optimizer steps whole tensors, each owned by one rank or sharded. Steps are collective.

    Its groups have the rank's parameters and the options of ``inner``'s groups. Options set on one side are copied to the other
    at a step. All other attributes are those of ``inner``.

    Args:
        inner: Optimizer of stand-ins for sharded parameters, and of the other parameters themselves.
        stand_ins: Stand-ins of each process group.
        sources: The rank's parameter of each stand-in, by the stand-in's id.
        extend: Makes stand-ins of parameters that are added later.

    Attributes:
        stand_ins: Stand-ins of each process group, including those of parameters that were added later.
        flats: Flat tensors by which an engine replaced the parameters; their indices are the labels of stand-ins.
    """

    def __init__(
        self,
        inner: Optimizer,
        stand_ins: Sequence[StandIns],
        sources: Mapping[int, nn.Parameter],
        extend: Extension,
        randomness: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.inner = inner
        self.stand_ins: list[StandIns] = list(stand_ins)
        self._sources, self._extend, self._randomness = dict(sources), extend, randomness
        self._is_built, self._is_hidden, self.flats = False, False, list[torch.Tensor]()
        super().__init__(self._local_groups() or [{"params": []}], dict(inner.defaults))
        self._is_built, self._options = True, GroupOptions(inner)
        for group, _ in zip(self.param_groups, inner.param_groups, strict=False):
            self._options.add(group)

    @staticmethod
    def unwrap(optimizer: Any) -> Any:
        """Return the optimizer inside of one of whole tensors, or the optimizer itself."""
        return optimizer.inner if isinstance(optimizer, WholeTensorOptimizer) else optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def named_stand_ins(self) -> dict[str, nn.Parameter]:
        """Return the stand-ins by the names of the whole tensors."""
        return {
            whole.name: parameter
            for each in self.stand_ins
            for whole, parameter in zip(each.wholes, each.parameters, strict=True)
        }

    def sources(self) -> set[int]:
        """Return the ids of the rank's parameters that have stand-ins."""
        return {id(whole.source) for each in self.stand_ins for whole in each.wholes}

    def parts(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters that are stepped in place as DTensors, by the names of the whole tensors."""
        return {whole.name: whole.source for each in self.stand_ins if each.is_in_place for whole in each.wholes}

    def owned_ids(self, labels: Container[int] | None = None) -> set[int]:
        """Return the ids of the stand-ins with these labels that this rank steps; None for all labels."""
        return {id(parameter) for each in self.stand_ins for parameter in each.owned_parameters(labels)}

    @property
    def steps_together(self) -> bool:
        """True if each rank steps all tensors, since the update of one depends on the others."""
        return any(each.is_on_all_ranks for each in self.stand_ins)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the whole tensors and scatter the new values. Collective."""
        self._options.exchange()
        labels = self._present_labels()
        try:
            for each in self.stand_ins:
                each.fetch_all(labels)
            with self._owned_only(labels), self._randomness(), torch.enable_grad():
                found = self.inner.step() if closure is None else self.inner.step(closure)
            for each in self.stand_ins:
                each.scatter(labels)
            self._normalize_state()
        finally:
            for each in self.stand_ins:
                each.release()
            self._options.exchange()
        return found

    def _normalize_state(self) -> None:
        if any(each.is_in_place for each in self.stand_ins):
            from .dtensors import normalize_state  # noqa: PLC0415  torch.distributed.tensor takes a second

            normalize_state(self.inner)

    def _present_labels(self) -> set[int] | None:
        """Return the indices of the flat tensors of this step, or None for all; an engine may step them in turns."""
        if not self.flats:
            return None
        present = {id(each) for group in self.param_groups for each in group["params"]}
        return {number for number, flat in enumerate(self.flats) if id(flat) in present}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the rank. Collective if they are sharded."""
        if not self._is_built:
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        local: list[nn.Parameter] = [given] if isinstance(given, nn.Parameter) else list(given)
        stepped, made = self._extend(local)
        self.stand_ins += made
        for new in made:
            self._sources |= {id(each): whole.source for each, whole in zip(new.parameters, new.wholes, strict=True)}
        self.inner.add_param_group({**param_group, "params": stepped})
        for new in made:
            new.release()
        super().add_param_group({**param_group, "params": local})
        self._options.add(self.param_groups[-1])

    def hide_state(self) -> None:
        """Hide the state from an engine that saves all state it finds; the state of whole tensors is saved in other files."""
        self._is_hidden = True

    def state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of ``inner``, with state of the tensors this rank owns; groups alone if state is hidden."""
        self._options.exchange()
        return super().state_dict() if self._is_hidden else self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._is_hidden:
            numbers = [id(group) for group in self._options.outer]
            kept = [numbers.index(id(group)) for group in self.param_groups]
            super().load_state_dict(state_dict)
            for number, group in zip(kept, self.param_groups, strict=True):
                self._options.outer[number] = group
            self._options.exchange()
            return
        self.inner.load_state_dict(state_dict)
        self._options.take_inner()

    def take_options(self) -> None:
        """Take the options of ``inner``, e.g. those of a checkpoint."""
        self._options.take_inner()

    def give_options(self) -> None:
        """Give ``inner`` the options that changed since the last step, e.g. a schedule's learning rate."""
        self._options.exchange()

    def _local_groups(self) -> list[dict[str, Any]]:
        """Return the groups of ``inner`` with the rank's parameters, each parameter in one group."""
        found, seen = [], set[int]()
        for group in self.inner.param_groups:
            local = {id(each): each for each in (self._sources.get(id(old), old) for old in group["params"])}
            own = [each for key, each in local.items() if key not in seen]
            seen |= local.keys()
            found.append({**{key: value for key, value in group.items() if key != "param_names"}, "params": own})
        return found

    @contextmanager
    def _owned_only(self, labels: Container[int] | None = None) -> Iterator[None]:
        """Hide the stand-ins that other ranks own; some optimizers also step parameters without a gradient."""
        owned = self.owned_ids(labels)
        others = {id(each) for own in self.stand_ins for each in own.parameters} - owned
        if not others:
            yield
            return
        kept: list[tuple[Any, Any, Any]] = []
        for group in groups_in(self.inner):
            kept.append((group, "params", group["params"]))
            group["params"] = [each for each in group["params"] if id(each) not in others]
        emptied = {id(group) for group, _, before in kept if before and not group["params"]}
        for each in optimizers_in(self.inner):  # some optimizers read the first parameter of a group
            kept.append((each.param_groups, slice(None), list(each.param_groups)))
            each.param_groups[:] = [group for group in each.param_groups if id(group) not in emptied]
            for value in vars(each).values():
                if isinstance(value, list) and any(id(item) in others for item in value):
                    kept.append((value, slice(None), list(value)))
                    value[:] = [item for item in value if id(item) not in others]
        try:
            yield
        finally:
            for holder, key, value in reversed(kept):  # wrappers share lists with their inner optimizers
                holder[key] = value
