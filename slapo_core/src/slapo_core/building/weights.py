"""Weights that do not exist yet: meta parameters, and how every layout gets the same numbers for them.

The whole model is put on the meta device for a moment. Then one module after the other gets full tensors, a seed from its
own original path, and the model's initialiser for it and for what contains it; this rank's shards are cut out and the full
tensors dropped. No rank holds more than its own weights and the full ones of one module.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ..modules.parameters import parameter_facts, shard_spec, successor
from ..modules.paths import find, join
from ..reporting.errors import BuildError

_DEFAULT_SEED = 2013  # as set_random_seed's
Initialiser = Callable[[nn.Module], Any]


@contextmanager
def init_empty_weights(enable: bool = True, include_buffers: bool = False) -> Iterator[None]:
    """Models built inside have their parameters on the meta device: shapes without memory.

    Args:
        enable: False makes this do nothing.
        include_buffers: Whether buffers go to the meta device as well.
    """
    if not enable:
        yield
        return
    register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer

    def parameter_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register_parameter(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = successor(param, param.detach().to("meta"))  # type: ignore[assignment]

    def buffer_on_meta(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        register_buffer(module, name, tensor.to("meta") if tensor is not None else None, persistent)

    nn.Module.register_parameter = parameter_on_meta  # type: ignore[method-assign,assignment]
    if include_buffers:
        nn.Module.register_buffer = buffer_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
        nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]


def materialize(
    root: nn.Module,
    parts: Iterable[nn.Module] | None = None,
    *,
    param_init_fn: Initialiser | None = None,
    seed: int | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Give every meta parameter and buffer of ``parts`` real values. Real values are never touched, ties stay ties.

    Where there are any, real buffers go to ``device`` too: ``init_empty_weights`` leaves them on the CPU.

    Args:
        root: The whole model; its initialiser runs on all of it.
        parts: What this rank runs, e.g. its stages; default: ``root``.
        param_init_fn: Called with each module, children first. Default: the model's own ``_init_weights``, as Transformers
            models have it, else each module's ``reset_parameters``.
        seed: Seed of the run; default: the one of ``set_random_seed``'s default.
        device: Where the values go; they are drawn on the CPU, so that every device gets the same.

    Raises:
        BuildError: the initialiser leaves a parameter, or a part of it, without values.
    """
    trees = [root, *(parts if parts is not None else ())]
    wanted = {id(place.tensor): place.tensor for tree in trees[1:] or trees for place in _places(tree) if place.tensor.is_meta}
    if not wanted:
        return
    initialise = param_init_fn or getattr(root, "_init_weights", None) or _reset
    new: dict[int, torch.Tensor] = {}
    places = list(_places(root))
    with _put({id(place.tensor): _full(place.tensor, "meta") for place in places}, places):
        for group in _groups(places, wanted):
            full = _initialised(root, group, initialise, seed)
            new |= {key: _localised(wanted[key], tensor, device) for key, tensor in full.items() if key in wanted}
    new |= {id(real): successor(real, real.to(device)) for tree in trees for real in tree.buffers() if not real.is_meta}
    for place in [place for tree in trees for place in _places(tree)]:
        place.table[place.name] = new.get(id(place.tensor), place.tensor)


class _Place(NamedTuple):
    """One entry of a module's table of parameters or buffers."""

    path: str
    table: dict[str, Any]
    name: str
    tensor: torch.Tensor


def _places(root: nn.Module) -> Iterator[_Place]:
    for path, module in root.named_modules():
        for table in (module._parameters, module._buffers):
            yield from (_Place(path, table, name, tensor) for name, tensor in table.items() if tensor is not None)


def _reset(module: nn.Module) -> None:
    getattr(module, "reset_parameters", lambda: None)()


@contextmanager
def _put(tensors: dict[int, torch.Tensor], places: list[_Place]) -> Iterator[None]:
    """Have these in the places of those with their ids inside."""
    before = [place.table[place.name] for place in places]
    try:
        for place in places:
            place.table[place.name] = tensors[id(place.tensor)]
        yield
    finally:
        for place, tensor in zip(places, before, strict=True):
            place.table[place.name] = tensor


def _full(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor of the unsharded shape, filled with what no initialiser writes, so that gaps show."""
    spec = shard_spec(tensor)
    full = torch.empty(spec.full_shape if spec else tensor.shape, dtype=tensor.dtype, device=device)
    full.fill_(_gap(full.dtype))
    return nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full


def _gap(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype is torch.bool else torch.iinfo(dtype).min


def _groups(places: list[_Place], wanted: dict[int, torch.Tensor]) -> Iterator[list[_Place]]:
    """The places that are made together: those of one module, or of several that share a tensor."""
    holders: dict[int, list[str]] = defaultdict(list)
    owned: dict[str, list[_Place]] = defaultdict(list)
    for place in places:
        holders[id(place.tensor)].append(place.path)
        owned[place.path].append(place)
    done: set[str] = set()
    for place in places:
        if id(place.tensor) not in wanted or place.path in done:
            continue
        paths: dict[str, None] = {}
        todo = [place.path]
        while todo:
            paths |= dict.fromkeys(todo)
            todo = [path for member in todo for held in owned[member] for path in holders[id(held.tensor)] if path not in paths]
        done |= paths.keys()
        yield [held for path in paths for held in owned[path]]


def _initialised(root: nn.Module, places: list[_Place], initialise: Initialiser, seed: int | None) -> dict[int, torch.Tensor]:
    """Full tensors for the places of a group of modules, by the id of the tensor each is for.

    The initialiser runs on the modules and on all that contain them, inner ones first, as ``nn.Module.apply`` does: a
    parent may initialise a child's tensor, as GPT-2 does.
    """
    full = {id(place.tensor): _full(place.tensor, "cpu") for place in places}
    chain = {".".join(parts[:end]) for place in places if (parts := place.path.split(".")) for end in range(len(parts) + 1)}
    with _put(full, places), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed(seed, places[0]))
        for path in sorted(chain, key=lambda path: (path == "", -path.count("."), path)):
            initialise(cast(nn.Module, find(root, path)))
    return full


def _seed(seed: int | None, place: _Place) -> int:
    names = parameter_facts(place.tensor).names or (join(place.path, place.name),)
    digest = hashlib.sha256(f"{_DEFAULT_SEED if seed is None else seed}:{names[0]}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def _localised(tensor: torch.Tensor, full: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """This rank's part of an initialised tensor, with all that is known of the meta one it replaces."""
    gap = _gap(full.dtype)
    if bool((full.isnan() if gap != gap else full == gap).any()) and full.dtype is not torch.bool:
        name = " = ".join(parameter_facts(tensor).names) or "a parameter that a step brought in"
        advice = "give an initialiser, param_init_fn=, that fills it, or real weights"
        raise BuildError(f"the initialiser leaves {name}, or a part of it, without values; {advice}")
    spec = shard_spec(tensor)
    return successor(tensor, (spec.local(full.detach()) if spec else full.detach()).to(device))
