"""Hooks of a whole model that is cut: forward-pre and backward hooks move to the first stage, forward hooks to the last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from slapo_core import BuildError, forward_signature, named_inputs
from slapo_tracing.nodes import is_opaque

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@contextmanager
def without_root_hooks(root: nn.Module) -> Iterator[None]:
    """Remove the hooks of the whole model while the context is open, except those that are traced with its forward."""
    tables = {name: root.__dict__[name] for name in _TABLES if not all(map(_is_traced, root.__dict__[name].values()))}
    for name, table in tables.items():
        root.__dict__[name] = OrderedDict((key, hook) for key, hook in table.items() if _is_traced(hook))
    try:
        yield
    finally:
        root.__dict__.update(tables)


def is_indivisible(root: nn.Module, module: nn.Module) -> bool:
    """Return whether a module has hooks or wrappers, so that no cut can lie inside; hooks of the whole model move instead."""
    if module is not root:
        return is_opaque(module)
    with without_root_hooks(root):
        return is_opaque(root)


def move_root_hooks(root: nn.Module, stages: Sequence[nn.Module], batch_inputs: Sequence[Sequence[str]]) -> None:
    """Put the hooks of the whole model on its first and last stage, where each runs once per micro-batch, in order.

    A hook receives the whole model as its module, and the arguments of its stage.

    Raises:
        BuildError: a backward hook that is not a full backward hook.
    """
    hooks = [[(key, hook) for key, hook in root.__dict__[name].items() if not _is_traced(hook)] for name in _TABLES]
    before, after, backward_pre, backward = hooks
    if before:
        others = {name: index for index, names in enumerate(batch_inputs) if index for name in names}
        stages[0].register_forward_pre_hook(partial(_run_pre_hooks, root, [key for key, _ in before], others), with_kwargs=True)
    if after:
        stages[-1].register_forward_hook(partial(_run_forward_hooks, root, [key for key, _ in after]), with_kwargs=True)
    for _, hook in backward_pre:
        stages[0].register_full_backward_pre_hook(_with_model(root, hook))
    if backward and not root._is_full_backward_hook:
        raise BuildError(
            f"the {type(root).__name__} has a backward hook that is not a full backward hook, which no stage can run; "
            "use register_full_backward_hook"
        )
    for _, hook in backward:
        stages[0].register_full_backward_hook(_with_model(root, hook))


def _is_traced(hook: Any) -> bool:
    return bool(getattr(hook, "traced", False))


def _with_model(root: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *gradients: hook(root, *gradients)


def _run_pre_hooks(
    root: nn.Module, keys: Sequence[int], others: Mapping[str, int], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = dict(kwargs)
    args, kwargs = _positional_call(root, given)
    for key in keys:
        hook = root._forward_pre_hooks[key]
        if key in root._forward_pre_hooks_with_kwargs:
            result = hook(root, args, kwargs)
            args, kwargs = (args, kwargs) if result is None else result
        elif (result := hook(root, args)) is not None:
            args = result if isinstance(result, tuple) else (result,)
    changed = named_inputs(root, args, kwargs)
    for name in {**given, **changed}:
        if changed.get(name) is not given.get(name) and (name in others or name not in given):
            where = f"stage {others[name]} reads it from the batch" if name in others else "the first stage does not read it"
            raise BuildError(
                f"a forward-pre hook of the whole model changes {name!r}, but {where}; change it in the batch or in the forward"
            )
    return (), changed


def _run_forward_hooks(
    root: nn.Module, keys: Sequence[int], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    for key in keys:
        hook = root._forward_hooks[key]
        result = hook(root, args, kwargs, output) if key in root._forward_hooks_with_kwargs else hook(root, args, output)
        output = output if result is None else result
    return output


def _positional_call(root: nn.Module, named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return as many arguments as possible by position: a hook without ``with_kwargs`` sees no others."""
    args: list[Any] = []
    for name, each in forward_signature(root).parameters.items():
        if each.kind is each.VAR_POSITIONAL and name in named:
            args += named[name]
        elif each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and name in named:
            args.append(named[name])
            continue
        break
    taken = list(forward_signature(root).bind_partial(*args).arguments)
    return tuple(args), {name: value for name, value in named.items() if name not in taken}
