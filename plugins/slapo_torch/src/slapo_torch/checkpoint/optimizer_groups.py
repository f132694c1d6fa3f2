"""Parameter groups of saved optimizers, matched to groups of the optimizers that load them, by names of parameters.

A factory makes groups of a rank's parameters, so another layout has other groups. Two parameters of one saved rank and of one
loading rank must share a group in both or in neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slapo_core import BuildError
from slapo_training.checkpoint import digest

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups of one rank: names of ``params``, and ``options``."""

SAME_LAYOUT = "load it on the same layout"
_ANOTHER = "the checkpoint's optimizer has other parameter groups"


def groups_of(optimizer: torch.optim.Optimizer, names: Sequence[list[str]]) -> list[dict[str, Any]]:
    """Return the parameter groups of this rank's optimizer, given the original names of the parameters of each group."""
    return [
        {"params": own, "options": {key: value for key, value in group.items() if key not in ("params", "param_names")}}
        for group, own in zip(optimizer.param_groups, names, strict=True)
    ]


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
