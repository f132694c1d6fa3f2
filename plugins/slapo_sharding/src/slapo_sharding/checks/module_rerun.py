"""Reruns of a module whose layers are sharded: on this rank's shards, and on whole values.

    shards: x -- column layer -- shard ------------------------------ row layer -- sum -- y
    whole:  x -- column layer -- gather -- whole value -- shard ----- row layer -- sum -- y

On whole values every layer computes its shard as before, but its output is gathered and its input is scattered at the layer
itself. The code between the layers then sees the values of the unmodified model. Syncs do nothing. No weight is gathered.
Attributes have the values that they had when the schedule was created: a shard step lets ``num_heads`` count this rank's
heads, and a user sets ``sch["attn"].mod.heads //= 2``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from slapo_core import ShardSpec, rng_state, set_rng_state
from slapo_tracing.nodes import name_of

from ..communication import collectives
from ..communication._torch_private import no_modes
from ..communication.collectives import Group
from ..planning.execution.layer_backends import BackendSync
from ..rules.sharding_rule import AppliedCut, split_of
from ..syncs.sync_hooks import Sync, map_first_input, map_output, syncs_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_KNOWN = ("torch.", "deepspeed", "megatron", "slapo_")
_DROPOUTS = frozenset(
    "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_alpha_dropout feature_dropout".split()
)


class NotComparable(Exception):
    """Error for a module that cannot run on whole values; the reason is for the log."""


class Rerun(TorchFunctionMode):
    """Mode that runs a module again without gradients, dropout and user hooks, and restores the random state.

    Args:
        call: ``nn.Module.__call__``.
        is_whole: Run on whole values.
        note: Called with each torch function of the code between the layers and its result, and with the inputs of layers.
    """

    def __init__(
        self, call: Callable[..., Any], is_whole: bool, note: Callable[[Any, Any], None] = lambda func, result: None
    ) -> None:
        super().__init__()
        self.call, self.is_whole, self.note = call, is_whole, note
        self.in_layer = 0
        self.has_drawn = False

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module; raise ``NotComparable`` if its own code communicates."""
        inside, before = list(module.modules()), rng_state()
        group = next((applied.spec.group for each in inside if (applied := split_of(each)) is not None), None)
        try:
            with ExitStack() as stack:
                for context in (torch.no_grad(), no_modes(), _without_hooks(inside, self.is_whole), _copied_buffers(inside)):
                    stack.enter_context(context)
                if self.is_whole:
                    stack.enter_context(original_sizes(inside))
                    stack.enter_context(_Communication(self, group))
                stack.enter_context(self)
                return self.run_inner_module(module, args, kwargs)
        finally:
            after = rng_state()
            self.has_drawn = not (_same(before.devices, after.devices) and before.tracked.keys() == after.tracked.keys())
            self.has_drawn |= not all(_same(states, after.tracked[name]) for name, states in before.tracked.items())
            set_rng_state(before)

    def run_inner_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module inside the forward."""
        applied = split_of(module)
        if applied is None:
            return self.call(module, *args, **kwargs)
        self.note(self.call, (args, kwargs))
        self.in_layer += 1
        try:
            if not self.is_whole:
                return self.call(module, *args, **kwargs)
            if applied.cut.input == "sharded":
                local = lambda x: _shard_layout(applied, x, x.shape[applied.cut.dim]).local(x)  # noqa: E731
                args, kwargs = map_first_input(local, args, kwargs)
            return _gathered_output(module, applied, args, kwargs, self.call(module, *args, **kwargs))
        finally:
            self.in_layer -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.in_layer and name_of(func) in _DROPOUTS and args:
            return args[0]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        if not self.in_layer:
            self.note(func, result)
        return result


class _Communication(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that refuses collectives of the group in code between the layers, which would get whole values."""

    def __init__(self, rerun: Rerun, group: Group) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rerun, self.group = rerun, group

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.rerun.in_layer and "c10d" in func.namespace and self._is_of_group([*args, *(kwargs or {}).values()]):
            raise NotComparable(f"its code calls {func} itself")
        return func(*args, **(kwargs or {}))

    def _is_of_group(self, given: list[Any]) -> bool:
        unboxed = [torch.distributed.ProcessGroup.unbox(each) for each in given if isinstance(each, torch.ScriptObject)]
        names = [each for each in given if isinstance(each, str)]
        return self.group is None or self.group in unboxed or self.group.group_name in names


def _gathered_output(module: nn.Module, applied: AppliedCut, args: Any, kwargs: Any, output: Any) -> Any:
    """Return the output of a layer, gathered or reduced to that of the unmodified layer."""
    if applied.cut.output == "sharded":
        return map_output(lambda x: _gather_output(x, applied), output)
    if any(isinstance(sync, BackendSync) and sync.mode == "fwd_post" for sync in module._forward_hooks.values()):
        return output
    return Sync("fwd_post", "all_reduce", group=applied.spec.group)(module, args, kwargs, output)


def _gather_output(x: torch.Tensor, applied: AppliedCut) -> torch.Tensor:
    spec, dim = applied.spec, applied.cut.dim % x.dim()
    is_known = x.shape[dim] == spec.sizes[spec.rank] and not applied.cut.parts
    whole = spec.full_shape[spec.dim] if is_known else x.shape[dim] * spec.num_shards
    missing = (max(spec.sizes) - x.shape[dim]) if is_known else 0
    padded = torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim) if missing else x
    shards = collectives.all_gather(padded.contiguous().unsqueeze(0), 0, spec.group)
    return _shard_layout(applied, x, whole).assemble(shards)


def _shard_layout(applied: AppliedCut, x: torch.Tensor, whole: int) -> ShardSpec:
    """Return the shard spec of a value: its sharded dimension is split like the weight's, or in equal parts."""
    spec, dim = applied.spec, applied.cut.dim % x.dim()
    shape = (*x.shape[:dim], whole, *x.shape[dim + 1 :])
    if whole == spec.full_shape[spec.dim] and not applied.cut.parts:
        return replace(spec, dim=dim, full_shape=shape)
    return replace(spec, dim=dim, full_shape=shape, blocks=(whole,), uneven_ranges=None)


@contextmanager
def _without_hooks(modules: list[nn.Module], is_whole: bool) -> Iterator[None]:
    """Remove user hooks in the block, and on whole values the syncs."""
    kept = [(module.__dict__, name, module.__dict__[name]) for module in modules for name in _HOOKS]
    try:
        for table, name, hooks in kept:
            if hooks:
                table[name] = type(hooks)((key, hook) for key, hook in hooks.items() if _is_kept_hook(hook, is_whole))
        yield
    finally:
        for table, name, hooks in kept:
            table[name] = hooks


def _is_kept_hook(hook: Any, is_whole: bool) -> bool:
    if isinstance(hook, Sync):
        return not is_whole or isinstance(hook, BackendSync)
    hook = getattr(hook, "func", hook)
    hook = getattr(hook, "__func__", hook)
    return str(getattr(hook, "__module__", "")).startswith(_KNOWN)


@contextmanager
def _copied_buffers(modules: list[nn.Module]) -> Iterator[None]:
    """Replace the modules' buffers by copies in the block, because a forward may change them in place."""
    copies: dict[torch.Tensor, torch.Tensor] = {}
    kept = [(module._buffers, dict(module._buffers)) for module in modules if module._buffers]
    try:
        for table, buffers in kept:
            for name, buffer in buffers.items():
                if buffer is not None and not is_lazy(buffer):
                    table[name] = copies[buffer] = copies[buffer] if buffer in copies else buffer.detach().clone()
        yield
    finally:
        for table, buffers in kept:
            table.clear()
            table.update(buffers)


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(state, other[device]) for device, state in one.items())


def rerun_obstacle(modules: list[nn.Module]) -> str | None:
    """Return why modules cannot run on whole values, or None."""
    from ..planning.local_sizes.local_forward import LocalForward  # noqa: PLC0415  (it imports the tracer)

    for module in modules:
        if isinstance(module, torch.fx.GraphModule):
            return "it runs from a graph"
        if isinstance(module.__dict__.get("forward"), LocalForward):
            return "it counts shards itself"
        if any(sync.op == "function" for sync in syncs_of(module)):
            return "a sync is a function"
        if any(hasattr(parameter, "ds_id") for parameter in module._parameters.values()):
            return "an engine holds its parameters"
    return None


_recorded: Any = WeakIdKeyDictionary()
"""Module to its size attributes, and those of its config."""


def record_sizes(model: nn.Module) -> None:
    """Record the sizes in the attributes of an unmodified model."""
    for module in model.modules():
        if module not in _recorded:
            _recorded[module] = [(in_config, dict(_sizes(holder))) for in_config, holder in _holders(module)]


@contextmanager
def original_sizes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the original sizes of modules in the block; sharded layers keep their local sizes."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in modules:
            for holder, name, value in _divided_attributes(module) if split_of(module) is None else ():
                changed.append((holder, name, holder[name]))
                holder[name] = value
        yield
    finally:
        for holder, name, value in reversed(changed):
            holder[name] = value


def _divided_attributes(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the attributes whose original values are multiples of the present ones: table, name and original value."""
    now = dict(_holders(module))
    for in_config, sizes in _recorded.get(module, ()):
        table = vars(now[in_config]) if in_config in now else {}
        for name, value in sizes.items():
            if _is_multiple(value, table.get(name)):
                yield table, name, value


def _holders(module: nn.Module) -> Iterator[tuple[bool, Any]]:
    yield False, module
    if hasattr(config := module.__dict__.get("config"), "__dict__"):
        yield True, config


def _sizes(holder: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(holder).items():
        if type(value) is int:
            yield name, value
        elif type(value) in (list, tuple) and value and all(type(each) is int for each in value):
            yield name, type(value)(value)


def _is_multiple(whole: Any, now: Any) -> bool:
    """Return whether a size, or one of several, was divided, and no other changed."""
    if type(whole) is not type(now):
        return False
    pairs = [(whole, now)] if isinstance(whole, int) else list(zip(whole, now, strict=False))
    if not isinstance(whole, int) and len(whole) != len(now):
        return False
    return whole != now and all(one == other or (0 < other < one and one % other == 0) for one, other in pairs)
