"""Outputs of chosen operators that a forward keeps, so that the recomputation does not run them, and policies that choose them.

It differs from torch's ``create_selective_checkpoint_contexts`` as follows. A policy gets the index of each operator call.
An output that is changed later is recomputed. A kept operator that draws random numbers sets the random state as after its
run in the forward. A second backward recomputes the outputs that the first has freed.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from ..forward_state._torch_private import alias_with_version, storage_key

MATMUL_OPERATORS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Operators of ``torch.ops.aten`` whose outputs ``"matmuls"`` keeps."""

Contexts = Callable[[], Any]
"""``context_fn`` of ``torch.utils.checkpoint.checkpoint``."""


def contexts_of(policy: Any) -> Contexts | None:
    """Return the ``context_fn`` of a policy or of a budget's ``CallPolicy``; None recomputes everything.

    Raises ``ValueError`` for others.
    """
    if policy is None:
        return None
    if policy == "matmuls":
        policy = MATMULS
    named = policy if isinstance(policy, (CallPolicy, OperatorPolicy)) else OperatorPolicy.of(policy)
    if named is not None:
        return partial(contexts, named.keeps)
    if callable(policy) and not isinstance(policy, nn.Module) and _is_policy_function(policy):
        return partial(contexts, partial(_is_saved, policy))
    raise ValueError(
        f"policy is {policy!r}; give None, 'matmuls', a list of operators such as torch.ops.aten.mm.default, or a policy "
        "function of torch.utils.checkpoint"
    )


def _is_policy_function(policy: Callable[..., Any]) -> bool:
    """Return whether a function takes the arguments of a policy function."""
    try:
        inspect.signature(policy).bind(None, None, None, None)
    except (TypeError, ValueError):  # ValueError: a built-in function without a signature
        return False
    return True


@dataclass(frozen=True)
class CallPolicy:
    """Policy that keeps the outputs of given calls of operators; it has names, so that it can be pickled with a model.

    Args:
        calls: Name of an operator, such as ``"aten.mm.default"``, to the indices of its calls in the forward.
    """

    calls: dict[str, frozenset[int]]

    def keeps(self, func: Any, index: int, *rest: Any) -> bool:
        return index in self.calls.get(str(func), ())


@dataclass(frozen=True)
class OperatorPolicy:
    """Policy that keeps the outputs of given operators; it has their names, as torch's objects cannot be pickled."""

    names: frozenset[str]

    @classmethod
    def of(cls, policy: Any) -> OperatorPolicy | None:
        """Make the policy from one operator or several, as torch's objects or names; return None for anything else."""
        found = [*map(_names, policy if isinstance(policy, (list, tuple)) else [policy])]
        return cls(frozenset().union(*found)) if found and all(found) else None

    def keeps(self, func: Any, *rest: Any) -> bool:
        return str(func) in self.names


def _is_saved(policy: Callable[..., Any], func: Any, index: int, args: Any, kwargs: Any, output: Any) -> bool:
    """Return whether a policy function of torch keeps the output."""
    context = SelectiveCheckpointContext(is_recompute=False, op_output=output)
    return policy(context, func, *args, **kwargs) in (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def _names(operator: Any) -> frozenset[str]:
    """Return the names of an operator's overloads, such as ``"aten.mm.default"``; none if it is not an operator."""
    if isinstance(operator, str):
        namespace, _, rest = operator.partition(".")
        operator = getattr(torch.ops, namespace, None) if namespace.isidentifier() and rest else None
        for name in rest.split("."):
            operator = getattr(operator, name, None)
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return frozenset(f"{operator}.{overload}" for overload in operator.overloads())  # type: ignore[no-untyped-call]
    return frozenset({str(operator)} if isinstance(operator, torch._ops.OpOverload) else ())


MATMULS = OperatorPolicy(frozenset(f"aten.{name}.default" for name in MATMUL_OPERATORS))


KeepDecision = Callable[[Any, int, tuple[Any, ...], dict[str, Any], Any], bool]
"""Function of an operator, the index of its call, its arguments and its output to whether the output is kept."""


def contexts(keeps: KeepDecision) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a forward and of its recomputation, as ``context_fn`` of torch's checkpoint returns them."""
    kept: _Kept = {}
    return _SaveMode(keeps, kept), _RestoreMode(kept)


class _KeptOutput:
    """A kept output, with version counters that tell whether it was changed later."""

    def __init__(self, output: Any, draws: bool) -> None:
        self.output = tree_map_only(torch.Tensor, alias_with_version, output)
        self.versions = [(tensor, tensor._version) for tensor in tensors_in(self.output)]
        self.random = _random_states() if draws else None

    def watch(self, alias: torch.Tensor) -> None:
        """Also detect changes through an alias with a version counter of its own."""
        self.versions.append((alias_with_version(alias), alias._version))

    def is_written(self) -> bool:
        """Return whether the output was changed in place, after the module's forward for example."""
        return any(tensor._version != version for tensor, version in self.versions)

    def take(self) -> Any:
        """Return the output, and set the random state as after its operator."""
        if self.random is not None:
            for device, state in self.random.items():
                torch.set_rng_state(state) if device is None else torch.cuda.set_rng_state(state, device)
        return self.output


_Kept = dict[tuple[Any, int], _KeptOutput]


class CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the calls of each operator since it was entered."""

    supports_higher_order_operators = True

    def __enter__(self) -> Any:
        self.counts: dict[Any, int] = defaultdict(int)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        index = self.counts[func]
        self.counts[func] += 1
        return self.run(func, index, args, kwargs)

    def run(self, func: Any, index: int, args: Any, kwargs: Any) -> Any:
        """Return the output of an operator; ``index`` is that of its call."""
        raise NotImplementedError


class _Mode(CountingMode):  # type: ignore[no-untyped-call]
    """Mode of a forward or recomputation with kept outputs."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch compiles code inside the mode."""
        return True


class _SaveMode(_Mode):  # type: ignore[no-untyped-call]
    """Mode of a forward, which keeps outputs."""

    def __init__(self, keeps: KeepDecision, kept: _Kept) -> None:
        super().__init__(kept)
        self.keeps = keeps
        self.places: dict[int, list[tuple[Any, int]]] = {}  # by memory

    def run(self, func: Any, index: int, args: Any, kwargs: Any) -> Any:
        for tensor in mutated_tensors(func, args, kwargs):
            for key in self.places.pop(storage_key(tensor), ()):
                self.kept.pop(key, None)
        output = func(*args, **kwargs)
        if func is torch.ops.aten._unsafe_view.default:  # the same memory with another version counter
            for key in self.places.get(storage_key(output), ()):
                self.kept[key].watch(output)
        elif self.keeps(func, index, args, kwargs, output) and has_own_storage(func, args, kwargs, output):
            self.kept[func, index] = _KeptOutput(output, is_random(func))
            for tensor in tensors_in(output):
                self.places.setdefault(storage_key(tensor), []).append((func, index))
        return output


class _RestoreMode(_Mode):  # type: ignore[no-untyped-call]
    """Mode of a recomputation, which returns kept outputs."""

    def run(self, func: Any, index: int, args: Any, kwargs: Any) -> Any:
        entry = self.kept.pop((func, index), None)
        return func(*args, **kwargs) if entry is None or entry.is_written() else entry.take()


def mutated_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call of an operator writes to."""
    if func.namespace == "c10d":  # collectives write to their first argument, which their schema does not say
        yield from tensors_in(args[:1])
    if not _is_mutable(func):
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))


def has_own_storage(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
    """Return whether the output shares no memory with the inputs and no generator argument has advanced."""
    outputs = list(tensors_in(output))
    if not outputs or _is_mutable(func) or func.namespace == "c10d":
        return False
    if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
        return False
    inputs = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
    return inputs.isdisjoint(storage_key(tensor) for tensor in outputs)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def is_random(func: Any) -> bool:
    """Return whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _is_mutable(func: Any) -> bool:
    """Return whether an operator writes to its arguments; higher-order operators have no schema and should not."""
    schema = getattr(func, "_schema", None)
    return schema is not None and schema.is_mutable


def _random_states() -> dict[int | None, torch.Tensor]:
    """Return the states of the default generators, by index of the current CUDA device and None for the CPU."""
    states: dict[int | None, torch.Tensor] = {None: torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states[torch.cuda.current_device()] = torch.cuda.get_rng_state()
    return states
