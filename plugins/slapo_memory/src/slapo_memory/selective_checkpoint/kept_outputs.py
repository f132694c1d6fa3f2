"""Outputs of chosen operators, kept by a forward for its recompute, which then does not run these operators.

As torch's ``create_selective_checkpoint_contexts``, with these differences: an operator knows which call of its kind it is, an
output that somebody writes to later is computed again, an operator that draws random numbers leaves the random state behind
it as in the forward, and a second backward computes again what the first has used up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS

from ..forward_state._torch_private import alias_with_version, storage_key

Keeps = Callable[[Any, int, tuple[Any, ...], dict[str, Any], Any], bool]
"""Of an operator, how many calls of it came before, its arguments and its output: whether this is kept."""


def contexts(keeps: Keeps) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The contexts of a forward and of its recompute, as ``torch.utils.checkpoint.checkpoint`` takes them."""
    kept: _Kept = {}
    return _Keeping(keeps, kept), _Taking(kept)


class _Entry:
    """An output, with what tells whether somebody has written to it since."""

    def __init__(self, output: Any, draws: bool) -> None:
        self.output = tree_map_only(torch.Tensor, alias_with_version, output)
        self.versions = [(tensor, tensor._version) for tensor in tensors_in(self.output)]
        self.random = _random_states() if draws else None

    def watch(self, alias: torch.Tensor) -> None:
        """Notice what is written to by this name, too."""
        self.versions.append((alias_with_version(alias), alias._version))

    def is_written(self) -> bool:
        """Whether somebody has written to it, behind the module say."""
        return any(tensor._version != version for tensor, version in self.versions)

    def take(self) -> Any:
        """The output, and the random state behind it."""
        if self.random is not None:
            for device, state in self.random.items():
                torch.set_rng_state(state) if device is None else torch.cuda.set_rng_state(state, device)
        return self.output


_Kept = dict[tuple[Any, int], _Entry]


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of each operator."""

    supports_higher_order_operators = True

    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        self.counts: dict[Any, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code runs as it is; torch would not compile inside the mode else."""
        return True

    def __enter__(self) -> Any:
        self.counts.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        index = self.counts[func]
        self.counts[func] += 1
        return self.run(func, index, args, kwargs)

    def run(self, func: Any, index: int, args: Any, kwargs: Any) -> Any:
        """Run an operator, or not."""
        raise NotImplementedError


class _Keeping(_Mode):  # type: ignore[no-untyped-call]
    """Of a forward."""

    def __init__(self, keeps: Keeps, kept: _Kept) -> None:
        super().__init__(kept)
        self.keeps = keeps
        self.places: dict[int, list[tuple[Any, int]]] = {}  # by memory

    def run(self, func: Any, index: int, args: Any, kwargs: Any) -> Any:
        for tensor in written(func, args, kwargs):
            for key in self.places.pop(storage_key(tensor), ()):
                self.kept.pop(key, None)
        output = func(*args, **kwargs)
        if func is torch.ops.aten._unsafe_view.default:  # the same memory, but another count of versions
            for key in self.places.get(storage_key(output), ()):
                self.kept[key].watch(output)
        elif self.keeps(func, index, args, kwargs, output) and is_fresh(func, args, kwargs, output):
            self.kept[func, index] = _Entry(output, is_random(func))
            for tensor in tensors_in(output):
                self.places.setdefault(storage_key(tensor), []).append((func, index))
        return output


class _Taking(_Mode):  # type: ignore[no-untyped-call]
    """Of a recompute."""

    def run(self, func: Any, index: int, args: Any, kwargs: Any) -> Any:
        entry = self.kept.pop((func, index), None)
        return func(*args, **kwargs) if entry is None or entry.is_written() else entry.take()


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call of an operator writes to."""
    if func.namespace == "c10d":  # collectives do, to their first argument, without saying so
        yield from tensors_in(args[:1])
    if not _is_mutable(func):
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))


def is_fresh(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
    """Whether the output is memory of its own, and nothing but the default generators has moved."""
    outputs = list(tensors_in(output))
    if not outputs or _is_mutable(func) or func.namespace == "c10d":
        return False
    if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
        return False
    inputs = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
    return inputs.isdisjoint(storage_key(tensor) for tensor in outputs)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in containers."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def is_random(func: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _is_mutable(func: Any) -> bool:
    """Whether an operator writes to its arguments; operators of higher order, which have no schema, should not."""
    schema = getattr(func, "_schema", None)
    return schema is not None and schema.is_mutable


def _random_states() -> dict[int | None, torch.Tensor]:
    """Of the default generators; by number of the current CUDA device, None for the CPU."""
    states: dict[int | None, torch.Tensor] = {None: torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states[torch.cuda.current_device()] = torch.cuda.get_rng_state()
    return states
