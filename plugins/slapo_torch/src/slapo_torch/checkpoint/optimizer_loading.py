"""Loading of optimizer state: this rank's own state on the same layout, state common to all ranks on any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from slapo_core import BuildError, is_sharded
from slapo_training.checkpoint import StateLoading
from slapo_training.model import Piece
from slapo_training.optimizers import NamedOptimizer

from . import optimizer_groups
from .model_state import piece_of_parameter
from .optimizer_groups import SAME_LAYOUT
from .optimizer_state import class_of, groups, key_of


class LoadedState(NamedTuple):
    """State that this rank's optimizer loads, without per-element tensors.

    Args:
        options: Options of each group.
        source: Index of the saved pipeline rank with the same groups, or None.
        state: State of each parameter that is stored once.
        numbers: Scalars of each parameter, with dtypes of scalar tensors.
        parts: State of another shape that fits this rank's shard of each parameter.
        foreign: State of keys that are no parameters.
        more: The rest of the ``state_dict``.
    """

    options: list[dict[str, Any]]
    source: int | None
    state: dict[str, Any]
    numbers: dict[str, Any]
    parts: dict[str, Any]
    foreign: dict[str, Any]
    more: dict[str, Any]


def select_state(
    named: NamedOptimizer,
    everyone: Sequence[Sequence[Mapping[str, Any]]],
    saved: Mapping[str, Any] | None,
    own: Mapping[str, Any] | None,
    parts: Mapping[str, Any],
    depends_on_group_order: bool,
) -> LoadedState:
    """Return the state that an optimizer loads.

    Args:
        everyone: ``groups`` of all ranks.
        saved: Result of ``merge``; None if no optimizer was saved.
        own: ``OptimizerState.own`` of the saved rank with the same shards of parameters; None if shards differ.
        parts: State of other shapes that fits this rank's shards, by name.
        depends_on_group_order: True with a learning-rate schedule.

    Raises:
        BuildError: no state was saved; or it is of another class, of other groups, or for the same layout only.
    """
    optimizer = named.optimizer
    if saved is None:
        raise BuildError("the checkpoint has no optimizer state; build without optimizer= to load the weights alone")
    kind = type(optimizer).__name__
    there = saved["class"] if own is None else own["class"]
    if there != class_of(optimizer):
        raise BuildError(f"the checkpoint's optimizer is {there}, the engine's is {class_of(optimizer)}; build with the same")
    optimizer_groups.check_names(everyone, saved["groups"])
    before, here = (saved["groups"] if own is None else [own["groups"]]), groups(named)
    if own is not None:
        optimizer_groups.check_names([here], before)
    optimizer_groups.check_same(here, before)
    _check_parts(named, saved["state"], parts)
    if own is None and saved["differs"]:
        raise BuildError(f"the ranks that saved it had different {saved['differs']} in the state of {kind}; {SAME_LAYOUT}")
    if own is None and saved["foreign"]:
        raise BuildError(f"{kind} keeps more than its parameters' state; {SAME_LAYOUT}")
    options, source = optimizer_groups.match_groups(here, before, depends_on_group_order)
    numbers = saved["numbers"] if own is None else {**saved["numbers"], **own["numbers"]}
    rest = ({}, saved["more"]) if own is None else (own["foreign"], own["more"])
    return LoadedState(options, source if own is None else None, saved["state"], numbers, dict(parts), *rest)


def tensors_to_read(
    named: NamedOptimizer,
    selected: LoadedState,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    path: str,
) -> dict[tuple[str, Any], Piece]:
    """Return new tensors to read the per-element state into, by parameter and the optimizer's key."""
    found = {}
    for name in named.own():
        parameter = named.local(name)
        for key in selected.state.get(name, {"tensors": ()})["tensors"]:
            _, dtype = shapes[key_of(name, key, path)]
            found[name, key] = piece_of_parameter(parameter, torch.empty(parameter.shape, dtype=dtype))
    return found


def _check_parts(named: NamedOptimizer, state: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Refuse state of other shards than this rank's; ``parts`` is state of other shapes that fits this rank's shards.

    Raises:
        BuildError: a parameter needs such state.
    """
    for name, parameter in named.own().items():
        kept = state.get(name, {"parts": (), "values": {}})
        of_whole = kept["values"] if is_sharded(parameter) else ()
        for key in [*of_whole, *(key for key in kept["parts"] if key not in parts.get(name, {}))]:
            raise BuildError(
                f"{key!r} in the state of {type(named.optimizer).__name__} is no number for each element of {name!r}, which "
                f"is sharded otherwise than when it was saved; {SAME_LAYOUT}"
            )


def restore(
    named: NamedOptimizer,
    selected: LoadedState,
    read: Mapping[tuple[str, Any], Piece],
    loading: StateLoading,
) -> None:
    """Load the selected state into the optimizer."""
    (names, listed), own = named.names(), named.own()
    index = {name: number for number, name in enumerate(names)}
    state: dict[Any, Any] = dict(selected.foreign)
    for name in own:
        if (kept := selected.state.get(name)) is not None:
            tensors = {key: read[name, key].tensor for key in kept["tensors"]}
            single = selected.numbers.get(name, {}).items()
            numbers = {key: value if dtype is None else torch.tensor(value, dtype=dtype) for key, (value, dtype) in single}
            parts = {key: selected.parts[name][key] for key in kept["parts"]}
            state[index[name]] = named.loadable_state(name, tensors, {**numbers, **kept["values"], **parts})
    for name in named.elsewhere:
        if marks := named.optimizer.state.get(named.known[name]):
            state[index[name]] = dict(marks)
    made = [{**each, "params": [index[name] for name in group]} for each, group in zip(selected.options, listed, strict=True)]
    packed = {**selected.more, "state": state, "param_groups": made}
    loading.load(type(named.optimizer).__name__, named.load_state_dict, packed, named.state_dict)
