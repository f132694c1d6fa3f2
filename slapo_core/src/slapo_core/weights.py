"""Weights that do not exist yet: meta parameters, and how every layout gets the same numbers for them.

The model's own initialiser runs once on meta tensors of full shape, which costs nothing, while every operation it does is
recorded. Each parameter this rank needs is then made alone: full tensor, its own seed from its original name, its
operations replayed, its shard cut out. No rank holds more than its own weights and one full tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .errors import BuildError
from .parameters import facts, shard_spec, successor

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
    """Give every meta parameter and buffer of ``parts`` real values. Real ones are never touched, ties stay ties.

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
    wanted = _meta_tensors(trees[1:] or trees)
    if not wanted:
        return
    initialise = param_init_fn or getattr(root, "_init_weights", None) or _reset
    recording = _record(root, initialise)
    new = {key: _make(tensor, recording, _seed(seed, tensor), device) for key, tensor in wanted.items()}
    for tree in trees:
        for module in tree.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None and id(tensor) in new:
                        table[name] = new[id(tensor)]  # type: ignore[assignment]


def _meta_tensors(trees: Iterable[nn.Module]) -> dict[int, torch.Tensor]:
    tensors = (tensor for tree in trees for tensor in [*tree.parameters(), *tree.buffers()])
    return {id(tensor): tensor for tensor in tensors if tensor.is_meta}


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _seed(seed: int | None, tensor: torch.Tensor) -> int:
    name = facts(tensor).names[0] if facts(tensor).names else ""
    digest = hashlib.sha256(f"{_DEFAULT_SEED if seed is None else seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations an initialiser did, grouped by the tensors they connect."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.group: dict[int, int] = {}  # id of a tensor -> id of a tensor of its group: a union-find forest
        self.stand_ins: dict[int, torch.Tensor] = {}  # id of a model's tensor -> the full meta tensor that stood in for it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
        for tensor in tensors[1:]:
            self.group[self.leader(tensors[0])] = self.leader(tensor)
        if tensors:
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def leader(self, tensor: torch.Tensor) -> int:
        """The tensor's group."""
        key = id(tensor)
        while self.group.setdefault(key, key) != key:
            key = self.group[key]
        return key


def _record(root: nn.Module, initialise: Initialiser) -> _Recording:
    """Run the initialiser on full-shaped meta stand-ins of all parameters and buffers, and put the real ones back."""
    recording = _Recording()
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (table, name, tensor)
        for module in root.modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    for _, _, tensor in places:
        if id(tensor) not in recording.stand_ins:
            spec = shard_spec(tensor)
            empty = torch.empty(spec.full_shape if spec else tensor.shape, dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            recording.stand_ins[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    try:
        for table, name, tensor in places:
            table[name] = recording.stand_ins[id(tensor)]
        with torch.no_grad(), recording:
            root.apply(initialise)
    finally:
        for table, name, tensor in places:
            table[name] = tensor
    return recording


def _make(tensor: torch.Tensor, recording: _Recording, seed: int, device: torch.device | str) -> torch.Tensor:
    stand_in = recording.stand_ins.get(id(tensor))
    name = " = ".join(facts(tensor).names) or "a parameter that a step brought in"
    calls = _calls_on(recording, stand_in) if stand_in is not None else []
    if not calls:
        raise BuildError(f"nothing initialises {name}, which is on the meta device; pass param_init_fn= or real weights")
    assert stand_in is not None
    full = torch.zeros(stand_in.shape, dtype=stand_in.dtype)
    if full.is_floating_point():
        full.fill_(float("nan"))
    real: dict[int, torch.Tensor] = {id(stand_in): full}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for func, args, kwargs, result in calls:
            _replay(func, args, kwargs, result, real)
    if full.isnan().any():
        raise BuildError(f"the initialiser leaves a part of {name} without values; pass param_init_fn=")
    spec = shard_spec(tensor)
    return successor(tensor, (spec.local(full) if spec else full).to(device))


def _calls_on(recording: _Recording, stand_in: torch.Tensor) -> list[Any]:
    group = recording.leader(stand_in)

    def concerns(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.is_meta and recording.leader(leaf) == group

    return [call for call in recording.calls if any(map(concerns, tree_leaves(call[1:])))]


def _replay(func: Any, args: Any, kwargs: Any, result: Any, real: dict[int, torch.Tensor]) -> None:
    def swap(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_meta:
            return real.setdefault(id(leaf), torch.empty(leaf.shape, dtype=leaf.dtype))
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    value = func(*tree_map(swap, args), **tree_map(swap, kwargs))
    for meta, made in zip(tree_leaves(result), tree_leaves(value), strict=True):
        if isinstance(meta, torch.Tensor):
            real[id(meta)] = made
