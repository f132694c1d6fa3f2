"""Initialisation of meta parameters to values that do not depend on the layout.

The whole model is put on the meta device temporarily. Then one module at a time gets full tensors and a seed from its original
path, and the model's initialiser runs on it and on the modules that contain it. This rank's shards are cut out and the full
tensors dropped. A rank holds no more than its own weights and the full ones of one module.
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
    """Put the parameters of models built in a ``with`` block on the meta device: shapes without memory.

    Args:
        enable: False has no effect.
        include_buffers: True puts buffers on the meta device as well.

    Example:
        >>> with init_empty_weights():
        ...     model = nn.Linear(2, 2)
        >>> model.weight.is_meta
        True
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
    """Give real values to every meta parameter and buffer of ``parts``.

    Real values are never changed, and ties are kept. If there are meta tensors, real buffers are moved to ``device`` too, since
    ``init_empty_weights`` leaves them on the CPU.

    Args:
        root: The whole model; its initialiser runs on all of it.
        parts: The modules that this rank runs, e.g. its stages; default: ``root``.
        param_init_fn: Called with each module, children first. Default: the model's own ``_init_weights``, as in Transformers
            models, else each module's ``reset_parameters``.
        seed: Seed of the run; default: the default of ``set_random_seed``.
        device: Device of the values. They are drawn on the CPU, so that every device gets the same.

    Raises:
        BuildError: the initialiser leaves a parameter, or a part of it, without values.

    Example:
        >>> with init_empty_weights():
        ...     model = nn.Linear(2, 2)
        >>> materialize(model, seed=1)
        >>> model.weight.is_meta, bool(model.weight.isfinite().all())
        (False, True)
    """
    trees = [root, *(parts if parts is not None else ())]
    wanted = {id(slot.tensor): slot.tensor for tree in trees[1:] or trees for slot in _slots(tree) if slot.tensor.is_meta}
    if not wanted:
        return
    initialise = param_init_fn or getattr(root, "_init_weights", None) or _reset_parameters
    new: dict[int, torch.Tensor] = {}
    slots = list(_slots(root))
    with _temporary_tensors({id(slot.tensor): _unset_full_tensor(slot.tensor, "meta") for slot in slots}, slots):
        for group in _joint_groups(slots, wanted):
            full = _fill_group(root, group, initialise, seed)
            new |= {key: _local_tensor(wanted[key], tensor, device) for key, tensor in full.items() if key in wanted}
    new |= {id(real): successor(real, real.to(device)) for tree in trees for real in tree.buffers() if not real.is_meta}
    for slot in [slot for tree in trees for slot in _slots(tree)]:
        slot.table[slot.name] = new.get(id(slot.tensor), slot.tensor)


class _Slot(NamedTuple):
    """One entry of a module's table of parameters or buffers."""

    path: str
    table: dict[str, Any]
    name: str
    tensor: torch.Tensor


def _slots(root: nn.Module) -> Iterator[_Slot]:
    for path, module in root.named_modules():
        for table in (module._parameters, module._buffers):
            yield from (_Slot(path, table, name, tensor) for name, tensor in table.items() if tensor is not None)


def _reset_parameters(module: nn.Module) -> None:
    getattr(module, "reset_parameters", lambda: None)()


@contextmanager
def _temporary_tensors(tensors: dict[int, torch.Tensor], slots: list[_Slot]) -> Iterator[None]:
    """Put these tensors in the slots of the tensors with their ids, in a ``with`` block."""
    before = [slot.table[slot.name] for slot in slots]
    try:
        for slot in slots:
            slot.table[slot.name] = tensors[id(slot.tensor)]
        yield
    finally:
        for slot, tensor in zip(slots, before, strict=True):
            slot.table[slot.name] = tensor


def _unset_full_tensor(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor of the unsharded shape, filled with a value that no initialiser writes, so that gaps are detected."""
    spec = shard_spec(tensor)
    full = torch.empty(spec.full_shape if spec else tensor.shape, dtype=tensor.dtype, device=device)
    full.fill_(_unset_value(full.dtype))
    return nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full


def _unset_value(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype is torch.bool else torch.iinfo(dtype).min


def _joint_groups(slots: list[_Slot], wanted: dict[int, torch.Tensor]) -> Iterator[list[_Slot]]:
    """Yield the slots that are initialised together: those of one module, or of several that share a tensor."""
    holders: dict[int, list[str]] = defaultdict(list)
    owned: dict[str, list[_Slot]] = defaultdict(list)
    for slot in slots:
        holders[id(slot.tensor)].append(slot.path)
        owned[slot.path].append(slot)
    done: set[str] = set()
    for slot in slots:
        if id(slot.tensor) not in wanted or slot.path in done:
            continue
        paths = [slot.path]
        for path in paths:  # grows meanwhile
            paths += dict.fromkeys(other for held in owned[path] for other in holders[id(held.tensor)] if other not in paths)
        done.update(paths)
        yield [held for path in paths for held in owned[path]]


def _fill_group(root: nn.Module, slots: list[_Slot], initialise: Initialiser, seed: int | None) -> dict[int, torch.Tensor]:
    """Return full tensors for the slots of a group of modules, by the id of the tensor that each replaces.

    The initialiser runs on the modules and on all that contain them, inner ones first, as in ``nn.Module.apply``: a parent may
    initialise a child's tensor, as GPT-2 does.
    """
    full = {id(slot.tensor): _unset_full_tensor(slot.tensor, "cpu") for slot in slots}
    chain = {".".join(parts[:end]) for slot in slots if (parts := slot.path.split(".")) for end in range(len(parts) + 1)}
    with _temporary_tensors(full, slots), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed(seed, slots[0]))
        for path in sorted(chain, key=lambda path: (path == "", -path.count("."), path)):
            initialise(cast(nn.Module, find(root, path)))
    return full


def _seed(seed: int | None, slot: _Slot) -> int:
    names = parameter_facts(slot.tensor).names or (join(slot.path, slot.name),)
    digest = hashlib.sha256(f"{_DEFAULT_SEED if seed is None else seed}:{names[0]}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def _local_tensor(tensor: torch.Tensor, full: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return this rank's part of an initialised tensor, with the facts of the meta tensor that it replaces."""
    gap = _unset_value(full.dtype)
    if bool((full.isnan() if gap != gap else full == gap).any()) and full.dtype is not torch.bool:
        name = " = ".join(parameter_facts(tensor).names) or "a parameter that a step brought in"
        advice = "give an initialiser, param_init_fn=, that fills it, or real weights"
        raise BuildError(f"the initialiser leaves {name}, or a part of it, without values; {advice}")
    spec = shard_spec(tensor)
    return successor(tensor, (spec.local(full.detach()) if spec else full.detach()).to(device))
