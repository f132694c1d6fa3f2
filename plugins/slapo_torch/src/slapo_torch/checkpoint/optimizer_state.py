"""Optimizer state in checkpoints: the ``state_dict`` by original names of parameters.

State of another shape than its parameter is stored once if the rank has the whole parameter; state of a shard fits the same
shards only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from slapo_core import BuildError, is_sharded
from slapo_training.checkpoint import check_plain, digest
from slapo_training.model import Piece
from slapo_training.optimizers import NamedOptimizer
from slapo_training.optimizers.whole_tensors import local_of

from ..fsdp.replica_spec import replica_spec
from .model_state import piece_of_parameter


class OptimizerState(NamedTuple):
    """Optimizer state of this rank.

    Args:
        tensors: Per-element state, by the parameter's name and the optimizer's key.
        own: Plain data that this rank loads on the same layout.
        once: Plain data of each parameter that is stored once.
    """

    tensors: dict[tuple[str, Any], Piece]
    own: dict[str, Any]
    once: dict[str, Any]


def key_of(name: str, key: Any, path: str = "") -> str:
    """Return the unique name of a state tensor in the checkpoint; ``path`` is that of a nested optimizer."""
    return f"optimizer.{f'[{path!r}].' if path else ''}{key if isinstance(key, str) and key.isidentifier() else [key]}.{name}"


def check(named: NamedOptimizer) -> None:
    """Refuse state that a checkpoint cannot hold.

    Raises:
        BuildError: the state has objects that need code of a file to load; or state of another shape than its parameter, which
            FSDP shards.
    """
    kind = type(named.optimizer).__name__
    state, more = _named_state(named)
    own = {name: {key: local_of(value) for key, value in each.items()} for name, each in state["parameters"].items()}
    check_plain({**state, "parameters": own, "groups": groups(named), "more": more}, f"the state of {kind}")
    for parameter, kept in named.optimizer.state.items():
        if not isinstance(parameter, torch.Tensor):
            if isinstance(parameter, int):
                raise BuildError(f"{kind} keeps a state for {parameter!r}, which is a parameter's number in a checkpoint")
            continue
        whole = replica_spec(parameter) is None
        odd = [key for key, value in kept.items() if not (whole or _is_scalar(value) or _is_per_element(value, parameter))]
        if odd:
            raise BuildError(
                f"{odd[0]!r} in the state of {kind} is not a number for each element of a parameter, and replicas have rows of "
                "these; only data_parallel='ddp' saves it"
            )


def collect(named: NamedOptimizer) -> OptimizerState:
    """Return the state to save of an optimizer that passed ``check``."""
    entries, more = _named_state(named)
    known = named.known
    tensors: dict[tuple[str, Any], Piece] = {}
    numbers: dict[str, dict[Any, Any]] = {}
    parts: dict[str, dict[Any, Any]] = {}
    once: dict[str, Any] = {}
    for name, state in entries["parameters"].items():
        if name in named.elsewhere:  # its owner saves the state; here are only values from the optimizer's construction
            continue
        own = once[name] = {"tensors": [], "values": {}, "parts": []}
        for key, value in state.items():
            if _is_per_element(value, known[name]):
                own["tensors"].append(key)
                tensors[name, key] = piece_of_parameter(named.local(name), local_of(value))
            elif isinstance(value, torch.Tensor) and value.dim() == 0:  # thousands of pickled tensors would be slow
                numbers.setdefault(name, {})[key] = value.item(), value.dtype
            elif _is_scalar(value):
                numbers.setdefault(name, {})[key] = value, None
            elif is_sharded(known[name]):
                own["parts"].append(key)
                parts.setdefault(name, {})[key] = value
            else:
                own["values"][key] = local_of(value)
    rest = {"numbers": numbers, "parts": parts, "foreign": entries["foreign"], "more": more}
    return OptimizerState(tensors, {"class": class_of(named.optimizer), "groups": groups(named), **rest}, once)


def digests(own: Mapping[str, Any] | None) -> dict[str, dict[Any, str]]:
    """Return digests of the state that must be equal on ranks with the same parameters."""
    if own is None:
        return {}
    options = [({key: digest(value) for key, value in each["options"].items()}, each["params"]) for each in own["groups"]]
    found = {f" of {name!r}": {key: digest(value) for key, value in each.items()} for name, each in own["numbers"].items()}
    found |= {f" of the group of {name!r}": words for words, names in options for name in names}
    return {**found, "": {key: digest(value) for key, value in own["more"].items()}}


def merge(
    ranks: Sequence[tuple[Mapping[str, Any] | None, Mapping[str, Any]]],
    owners: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    everyone: Sequence[Mapping[str, Mapping[Any, str]]],
) -> dict[str, Any] | None:
    """Return the state that is stored once, of the optimizers of all pipeline ranks.

    Args:
        ranks: ``OptimizerState.own`` and ``OptimizerState.once`` of each pipeline rank.
        owners: The same of other ranks that own whole tensors.
    """
    found = [(own, once) for own, once in ranks if own is not None]
    if not found:
        return None
    owns = [own for own, _ in found]
    kept = [*found, *owners]
    return {
        "class": owns[0]["class"],
        "groups": [[] if own is None else own["groups"] for own, _ in ranks],
        "state": {name: each for _, once in reversed(kept) for name, each in once.items()},
        "numbers": {name: each for own, _ in reversed(kept) for name, each in own["numbers"].items()},
        "more": owns[0]["more"],
        "foreign": any(own["foreign"] for own, _ in kept),
        "differs": next(_differing_keys(everyone), ""),
    }


def _differing_keys(everyone: Sequence[Mapping[str, Mapping[Any, str]]]) -> Iterator[str]:
    """Iterate over the names of state whose digests differ between ranks."""
    unlike: list[Mapping[str, Mapping[Any, str]]] = []
    seen: dict[tuple[str, Any], str] = {}
    for each in everyone:
        if each not in unlike:
            unlike.append(each)
            for whose, words in each.items():
                yield from (f"{key!r}{whose}" for key, word in words.items() if seen.setdefault((whose, key), word) != word)


def groups(named: NamedOptimizer) -> list[dict[str, Any]]:
    """Return this rank's parameter groups: ``options``, and the original names of ``params``."""
    return [
        {"params": own, "options": {key: value for key, value in group.items() if key not in ("params", "param_names")}}
        for group, own in zip(named.optimizer.param_groups, named.names()[1], strict=True)
    ]


def _named_state(named: NamedOptimizer) -> tuple[dict[str, dict[Any, Any]], dict[str, Any]]:
    """Return the state of ``parameters`` by name and of ``foreign`` keys, and the rest of the ``state_dict``."""
    (names, _), written = named.names(), named.state_dict()
    found: dict[str, dict[Any, Any]] = {"parameters": {}, "foreign": {}}
    for key, value in written.pop("state").items():
        whose = ("parameters", names[key]) if type(key) is int else ("foreign", key)
        found[whose[0]][whose[1]] = value
    written.pop("param_groups")
    return found, written


def _is_per_element(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, torch.Tensor | list | tuple | dict) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def class_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
