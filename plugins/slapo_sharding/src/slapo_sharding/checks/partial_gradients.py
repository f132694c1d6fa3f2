"""Check of the first run: partial and replicated gradients must not mix.

Where a rank continues with its own shard of a value, or with its own use of a replicated value, all values computed there have
a different gradient on each rank. So does every value that meets them: a replicated parameter's gradient must then be reduced
(``sync("grad", "all_reduce")``), and a replicated value's gradient is wrong, because the value is replicated elsewhere. Values
are tracked from the syncs and the sharded modules on; results of code that torch does not show, such as the user's autograd
functions, are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from slapo_core import BuildError, is_sharded, parameter_facts
from slapo_tracing.nodes import is_metadata, name_of

from ..rules.sharding_rule import split_of
from ..splitting.persistent_hooks import reduces_gradient
from ..syncs import overlapped_reduction
from ..syncs.sync_hooks import Sync, map_first_input, map_output, syncs_of
from .value_tracking.tracked_value import makes_new, tensors_in


class GradientLayout(Enum):
    """Layout of a value's gradient; ``SUMMED`` is that of a parameter whose gradient a sync reduces."""

    REPLICATED = "the same on every rank"
    SHARDED = "of each rank's own value"
    PARTIAL = "of each rank's own use of a replicated value"
    SUMMED = "reduced by a sync"
    UNKNOWN = "unknown"


_MADE = {
    ("all_reduce", "split"): GradientLayout.REPLICATED,
    ("all_gather", "split"): GradientLayout.REPLICATED,
    ("all_gather", "reduce_scatter"): GradientLayout.PARTIAL,
}
"""Operation and its backward to the gradient layout of the result; other operations give ``SHARDED``."""


_METADATA_READERS = frozenset("to type_as expand_as view_as reshape_as".split())
"""Functions that read only the type or the shape of tensors after the first one."""
_DIFFERENT = frozenset((GradientLayout.SHARDED, GradientLayout.PARTIAL))
_OF_REPLICATED = frozenset((GradientLayout.REPLICATED, GradientLayout.PARTIAL))  # layouts that a replicated value may have

_WRONG = {
    GradientLayout.REPLICATED: (
        "{} uses {!r} on a value of which each rank has its own part or use, so each has a part of its gradient; "
        "needs sync('grad', 'all_reduce') of the module that holds it"
    ),
    GradientLayout.SUMMED: (
        "{} uses {!r}, whose gradient a sync sums, on a value whose gradient is the same on every rank, so that one of the two "
        "would be wrong; leave sync('grad', 'all_reduce') out"
    ),
}
"""Gradient layout of the parameter to the message."""


class PartialGradients:
    """Gradient layouts of the values in a running forward.

    Args:
        error: Makes the error for the code that runs now.
        is_off: Refuse nothing: all gradients count as unknown.
    """

    def __init__(self, error: Callable[[str], BuildError], is_off: bool = False) -> None:
        self.error, self.is_off = error, is_off
        self.known: Any = WeakIdKeyDictionary()

    def enter(self, module: nn.Module) -> list[RemovableHandle]:
        """Track the inputs of a module behind its syncs, by hooks to be removed when the module has returned."""
        syncs, split = list(syncs_of(module)), split_of(module)
        of_input = [sync for sync in syncs if sync.mode == "fwd_pre" or (sync.mode, sync.op) == ("bwd_post", "all_reduce")]
        by_hand = any(sync.op == "function" and sync.mode != "fwd_post" for sync in syncs)
        takes_replicated = split is not None and split.cut.input == "replicated" and not by_hand

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if of_input and of_input[-1].mode == "bwd_post":
                # without gradients the sync returns its input
                for tensor in tensors_in((args, kwargs)) if torch.is_grad_enabled() else ():
                    if tensor.requires_grad and self.layout_of(tensor) is not GradientLayout.SHARDED:
                        self._mark(tensor, GradientLayout.PARTIAL)
            elif of_input:
                self._after_sync(of_input[-1], (args, kwargs), lambda mark: map_first_input(mark, args, kwargs))
            if takes_replicated:
                self._check_inputs((args, kwargs))

        def check_twice(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad and torch.is_grad_enabled()]
            if any(self.layout_of(tensor) is GradientLayout.PARTIAL for tensor in given):
                raise self.error(
                    "sync('bwd_post', 'all_reduce') sums the gradient of its input, which an earlier sync sums already; "
                    "leave one of them out"
                )

        handles = [module.register_forward_pre_hook(note, with_kwargs=True)] if of_input or takes_replicated else []
        if any((sync.mode, sync.op) == ("bwd_post", "all_reduce") for sync in syncs):
            handles.append(module.register_forward_pre_hook(check_twice, with_kwargs=True, prepend=True))
        return handles

    def check_sum(self, op: str, x: torch.Tensor) -> torch.Tensor:
        """Raise ``BuildError`` for a replicated value: its sum would be multiplied by the number of ranks."""
        if torch.is_grad_enabled() and x.requires_grad and self.layout_of(x) in _OF_REPLICATED:
            raise self.error(
                f"sync('fwd_post', {op!r}) adds up what is the same on every rank already: it was reduced or gathered inside, "
                "or computed from replicated values; sync it once"
            )
        return x

    def _check_inputs(self, given: Any) -> None:
        """Refuse an input of a sharded layer whose gradient no sync reduces: the layer returns a partial one."""
        for tensor in tensors_in(given):
            if torch.is_grad_enabled() and tensor.requires_grad and self.layout_of(tensor) is GradientLayout.REPLICATED:
                raise self.error(
                    "it returns a partial gradient of its input, and no sync sums it, as the input is not the first, or was "
                    "computed by replicated parameters; give sync('bwd_post', 'all_reduce') to this module itself, or "
                    "sync('grad', 'all_reduce') to the module that holds the parameters"
                )

    def leave(self, module: nn.Module, output: Any) -> None:
        """Track the output of a module that has returned: its last sync, or its cut, determines the gradient layout."""
        after = list(syncs_of(module, "fwd_post"))
        if after:
            self._after_sync(after[-1], output, lambda mark: map_output(mark, output))
        elif (split := split_of(module)) is not None:
            for tensor in tensors_in(output):
                self._mark(tensor, GradientLayout.REPLICATED if split.cut.output == "whole" else GradientLayout.SHARDED)

    def check_output(self, output: Any) -> Any:
        """Return the model's output; a gradient for a value made between syncs of gradients is then a ``BuildError``.

        An auxiliary loss would give such a gradient. Other uses of the value in the model keep their gradients.
        """
        leaves = pytree.tree_leaves(output)
        if not any(isinstance(leaf, torch.Tensor) and self.layout_of(leaf) is GradientLayout.PARTIAL for leaf in leaves):
            return output
        why = (
            "it returns what is the same on every rank and was made inside of a bwd_post or a gather, which adds its "
            "gradient up; make it outside, give the sync to the sharded layers themselves, or detach it"
        )
        message = str(self.error(why))

        def refuse(grad: torch.Tensor) -> None:
            raise BuildError(message)  # an error made earlier would keep alive the frames of its traceback

        def add_gradient_hook(x: torch.Tensor) -> torch.Tensor:
            if not x.requires_grad or self.layout_of(x) is not GradientLayout.PARTIAL:
                return x
            x = x.view_as(x)
            x.register_hook(refuse)  # type: ignore[no-untyped-call]
            return x

        return pytree.tree_map_only(torch.Tensor, add_gradient_hook, output)

    def _after_sync(self, sync: Sync, value: Any, map_tensors: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> None:
        """Mark the result of a sync; a user's function may have changed any tensor that it was given."""
        if sync.op == "function":
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    self._mark(leaf, GradientLayout.UNKNOWN)
        else:
            map_tensors(lambda x: self._mark(x, _MADE.get((sync.op, sync.backward), GradientLayout.SHARDED)))

    def _mark(self, x: torch.Tensor, made: GradientLayout) -> torch.Tensor:
        self.known[x] = made
        return x

    def layout_of(self, x: torch.Tensor) -> GradientLayout | None:
        """Return the gradient layout of ``x``; None if it has no gradient."""
        if self.is_off:
            return GradientLayout.UNKNOWN
        if x in self.known:
            return self.known[x]  # type: ignore[no-any-return]
        if not (x.requires_grad and torch.is_grad_enabled()):
            return None
        if overlapped_reduction.reduction_of(x) is not None:
            return GradientLayout.PARTIAL
        if not isinstance(x, nn.Parameter):
            return GradientLayout.UNKNOWN
        if is_sharded(x):
            return GradientLayout.SHARDED
        return GradientLayout.SUMMED if reduces_gradient(x) else GradientLayout.REPLICATED

    def call(
        self, func: Callable[..., Any], tensors: Sequence[torch.Tensor], is_ours: Callable[[], bool]
    ) -> GradientLayout | BuildError | None:
        """Return the gradient layout of the results of a torch function outside sharded modules, before the call.

        An error is returned if the function mixes a replicated gradient with a different or summed one.
        """
        name = name_of(func)
        if not torch.is_grad_enabled() or is_metadata(func, name) or name.endswith("_like") or makes_new(name):
            return None
        given = [(tensor, self.layout_of(tensor)) for tensor in (tensors[:1] if name in _METADATA_READERS else tensors)]
        found = {gradient for _, gradient in given} - {None}
        if found and is_ours():
            return GradientLayout.UNKNOWN
        is_mixed = GradientLayout.REPLICATED in found and bool(found & {*_DIFFERENT, GradientLayout.SUMMED})
        if is_mixed and GradientLayout.UNKNOWN not in found:
            wrong = GradientLayout.REPLICATED if found & _DIFFERENT else GradientLayout.SUMMED
            return self.error(_gradient_problem(name, wrong, next(tensor for tensor, gradient in given if gradient is wrong)))
        return next((kind for kind in (GradientLayout.UNKNOWN, *GradientLayout) if kind in found), None)

    def start(self, x: torch.Tensor, is_whole: bool) -> None:
        """Track a value that the model sets to require a gradient, as it does with frozen embeddings."""
        if x not in self.known and not isinstance(x, nn.Parameter):
            self._mark(x, GradientLayout.REPLICATED if is_whole else GradientLayout.UNKNOWN)

    def note(self, result: Any, gradient: GradientLayout | BuildError | None, tensors: Iterable[torch.Tensor]) -> None:
        """Mark the results; raise ``gradient`` if it is an error and a result has a gradient, as a detached one has not."""
        if isinstance(gradient, BuildError):
            if any(tensor.requires_grad for tensor in tensors_in(result)):
                raise gradient
            return
        left = any(tensor.requires_grad for tensor in tensors)
        for tensor in tensors_in(result) if gradient is not None else ():
            if tensor.requires_grad or (tensor.is_floating_point() and not left):
                self.known[tensor] = gradient


def _gradient_problem(name: str, gradient: GradientLayout, x: torch.Tensor) -> str:
    if isinstance(x, nn.Parameter):
        return _WRONG[gradient].format(name, " = ".join(parameter_facts(x).names) or f"a parameter of shape {tuple(x.shape)}")
    if gradient is GradientLayout.SUMMED:
        return _WRONG[gradient].format(name, "a value made of a parameter")
    return (
        f"{name} puts a value whose gradient is the same on every rank together with one of which each rank has its own part "
        "or use, so one gradient is wrong; give bwd_post or the gather to the sharded layers themselves, reduce or gather "
        "before, or, if it is made of a parameter, sync('grad', 'all_reduce') of the module that holds that"
    )
