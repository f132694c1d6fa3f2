"""Loading of optimizer state: this rank's own state on the same layout, state common to all ranks on any other.

A factory makes groups of a rank's parameters, so another layout has other groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from slapo_core import BuildError, is_sharded
from slapo_training.checkpoint import StateLoading, digest
from slapo_training.model import Piece
from slapo_training.optimizers import NamedOptimizer

from .model_state import piece_of_parameter
from .optimizer_state import class_of, groups, key_of

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups of one rank: names of ``params``, and ``options``."""

SAME_LAYOUT = "load it on the same layout"
_ANOTHER = "the checkpoint's optimizer has other parameter groups"


class LoadedState(NamedTuple):
    """State that this rank's optimizer loads, without per-element tensors.

    Args:
        options: Options of each group.
        source: Index of the saved pipeline rank with the same groups, or None.
        state: State of each parameter that is stored once.
        numbers: Scalars of each parameter, with dtypes of scalar tensors.
        parts: State of another shape that fits this rank's shard of each parameter.
        foreign: State of keys that are not parameters.
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
    check_names(everyone, saved["groups"])
    before, here = (saved["groups"] if own is None else [own["groups"]]), groups(named)
    if own is not None:
        check_names([here], before)
    check_same(here, before)
    _check_parts(named, saved["state"], parts)
    if own is None and saved["differs"]:
        raise BuildError(f"the ranks that saved it had different {saved['differs']} in the state of {kind}; {SAME_LAYOUT}")
    if own is None and saved["foreign"]:
        raise BuildError(f"{kind} keeps more than its parameters' state; {SAME_LAYOUT}")
    options, source = match_groups(here, before, depends_on_group_order)
    numbers = saved["numbers"] if own is None else {**saved["numbers"], **own["numbers"]}
    rest = ({}, saved["more"]) if own is None else (own["foreign"], own["more"])
    return LoadedState(options, source if own is None else None, saved["state"], numbers, dict(parts), *rest)


def tensors_to_read(
    named: NamedOptimizer, selected: LoadedState, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], path: str
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
                f"{key!r} in the state of {type(named.optimizer).__name__} is not a number for each element of {name!r}, which "
                f"is sharded otherwise than when it was saved; {SAME_LAYOUT}"
            )


def restore(named: NamedOptimizer, selected: LoadedState, read: Mapping[tuple[str, Any], Piece], loading: StateLoading) -> None:
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


def check_names(own: Sequence[Groups], saved: Sequence[Groups]) -> None:
    """Refuse an optimizer of other parameters, given the groups of all ranks and of all saved ranks.

    Raises:
        BuildError: a parameter is in the groups of one side only.
    """
    here, there = ({name for groups in ranks for name in _group_indices(groups)} for ranks in (own, saved))
    for name in sorted(here ^ there):
        whose = "the engine's" if name in there else "its own"
        raise BuildError(f"{_ANOTHER}: {name!r} is in none of {whose}; build with the same parameters to train")


def check_same(own: Groups, saved: Sequence[Groups]) -> None:
    """Refuse an optimizer that groups parameters differently, given the groups of this rank and of all saved ranks.

    Raises:
        BuildError: two parameters share a group on one side only.
    """
    here = _group_indices(own)
    for there in map(_group_indices, saved):
        both = sorted(here.keys() & there.keys())
        for of, to, words in ((here, there, ("several", "one")), (there, here, ("one", "several"))):
            first: dict[int, str] = {}
            for name in both:
                other = first.setdefault(of[name], name)
                if to[other] != to[name]:
                    raise BuildError(
                        f"{_ANOTHER}: {other!r} and {name!r} are in {words[0]} of these, and in {words[1]} here; build with "
                        f"the same groups, or {SAME_LAYOUT}"
                    )


def match_groups(own: Groups, saved: Sequence[Groups], depends_on_group_order: bool) -> tuple[list[dict[str, Any]], int | None]:
    """Return the saved options for this rank's groups, and the saved rank with these groups, or None.

    Call it after ``check_names`` and ``check_same``. A learning-rate schedule depends on the order of groups, as its state
    has one entry per group.

    Raises:
        BuildError: saved ranks had different options for parameters of one group; or no saved rank had the groups that the
            schedule needs.
    """
    by_name = {name: group["options"] for groups in reversed(saved) for group in groups for name in group["params"]}
    wanted = [_common_options(group["params"], by_name) for group in own]
    words = [None if options is None else _options_digest(options) for options in wanted]

    def fits(groups: Groups) -> bool:
        pairs = zip(words, groups, strict=False)
        return len(groups) == len(own) and all(word in (None, _options_digest(group["options"])) for word, group in pairs)

    source = next((number for number, groups in enumerate(saved) if fits(groups)), None)
    if source is None and depends_on_group_order:
        raise BuildError(
            "the learning-rate schedule was saved for other parameter groups than this rank's, or for these in another order; "
            f"build with the same groups in the same order, or {SAME_LAYOUT}"
        )
    left = own if source is None else saved[source]
    return [dict(left[number]["options"]) if each is None else dict(each) for number, each in enumerate(wanted)], source


def _common_options(names: Sequence[str], by_name: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the saved options of the parameters of one group; None for a group without parameters."""
    found = {id(by_name[name]): (name, by_name[name]) for name in reversed(names)}
    if not found:
        return None
    (name, options), *others = reversed(found.values())
    for other, its in others:
        for key in sorted(options.keys() | its.keys()):
            if key not in options or key not in its or digest(options[key]) != digest(its[key]):
                raise BuildError(
                    f"{name!r} and {other!r} are in one parameter group, and ranks that saved them had different {key!r} for "
                    f"them; {SAME_LAYOUT}"
                )
    return options


def _group_indices(groups: Groups) -> dict[str, int]:
    return {name: number for number, group in enumerate(groups) for name in group["params"]}


def _options_digest(options: Mapping[str, Any]) -> str:
    return digest(sorted(options.items(), key=lambda item: item[0]))
