"""What this rank's optimizer takes of a checkpoint: on the same layout what its rank had, on any other what all had alike."""

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
    """Part of a checkpoint that this rank's optimizer takes, but for the tensors that lie where parameters do.

    Args:
        options: Of each group.
        source: Which of the ranks of a pipeline had such groups, if one had.
        state: Of each parameter what is kept once.
        numbers: Of each parameter single numbers, and the types of those that are tensors.
        parts: Of each parameter what fits this rank's part.
        foreign: What is kept of no parameter.
        more: What else is in the ``state_dict``.
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
    """Return the part of a checkpoint that the optimizer takes.

    Args:
        named: An optimizer of this rank.
        everyone: ``groups`` of all ranks.
        saved: What ``merged`` gave.
        own: ``State.own`` of the rank in this one's place, which had the same parts of parameters; None where it had others.
        parts: What fits parts of parameters as this rank has them, by name.
        depends_on_group_order: Whether there is a learning-rate schedule.

    Raises:
        BuildError: no state was saved, or that of another class, or other groups, or of what is only kept for the same layout.
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
    taken: LoadedState,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    path: str,
) -> dict[tuple[str, Any], Piece]:
    """Tensors for what is to be read of the optimizer's state, by parameter and the optimizer's own name."""
    found = {}
    for name in named.own():
        parameter = named.local(name)
        for key in taken.state.get(name, {"tensors": ()})["tensors"]:
            _, dtype = shapes[key_of(name, key, path)]
            found[name, key] = piece_of_parameter(parameter, torch.empty(parameter.shape, dtype=dtype))
    return found


def _check_parts(named: NamedOptimizer, state: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Refuse state of parts of parameters that are not this rank's.

    Args:
        named: An optimizer of this rank.
        state: Of each parameter what is kept once.
        parts: What fits this rank's parts, as it was saved.

    Raises:
        BuildError: it would be needed.
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
    taken: LoadedState,
    read: Mapping[tuple[str, Any], Piece],
    loading: StateLoading,
) -> None:
    """Hand the optimizer what was saved."""
    (names, listed), own = named.names(), named.own()
    index = {name: number for number, name in enumerate(names)}
    state: dict[Any, Any] = dict(taken.foreign)
    for name in own:
        if (kept := taken.state.get(name)) is not None:
            tensors = {key: read[name, key].tensor for key in kept["tensors"]}
            single = taken.numbers.get(name, {}).items()
            numbers = {key: value if dtype is None else torch.tensor(value, dtype=dtype) for key, (value, dtype) in single}
            parts = {key: taken.parts[name][key] for key in kept["parts"]}
            state[index[name]] = named.taken(name, tensors, {**numbers, **kept["values"], **parts})
    for name in named.elsewhere:
        if marks := named.optimizer.state.get(named.known[name]):
            state[index[name]] = dict(marks)
    made = [{**each, "params": [index[name] for name in group]} for each, group in zip(taken.options, listed, strict=True)]
    packed = {**taken.more, "state": state, "param_groups": made}
    loading.load(type(named.optimizer).__name__, named.load_state_dict, packed, named.state_dict)
