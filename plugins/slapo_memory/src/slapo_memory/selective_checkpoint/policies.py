"""Policies of a checkpoint: the operator outputs that it keeps for the recomputation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from .kept_outputs import contexts

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
    """Return the names of an operator's overloads, such as ``"aten.mm.default"``; none if it is no operator."""
    if isinstance(operator, str):
        namespace, _, rest = operator.partition(".")
        operator = getattr(torch.ops, namespace, None) if namespace.isidentifier() and rest else None
        for name in rest.split("."):
            operator = getattr(operator, name, None)
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return frozenset(f"{operator}.{overload}" for overload in operator.overloads())  # type: ignore[no-untyped-call]
    return frozenset({str(operator)} if isinstance(operator, torch._ops.OpOverload) else ())


MATMULS = OperatorPolicy(frozenset(f"aten.{name}.default" for name in MATMUL_OPERATORS))
