"""Where each rank has a part of a gradient and code mixes that with what has all of its own: found at the first run.

A rank that goes on with its own shard of a value, or with its own use of a whole one, has a gradient of its own of all that it
computes there. What meets such a value has one, too: a parameter's has to be summed then (``sync("grad", "all_reduce")``),
and a value's cannot be right, as it is the same on every rank elsewhere. Values are followed from the syncs and the sharded
modules on; what comes out of code that torch does not show, such as functions of autograd by hand, may be anything.
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
from ..syncs import overlapped_reduction
from ..syncs.sync_hooks import Sync, map_first_input, map_output, reduces_gradient, syncs_of
from .value_tracking.tracked_value import makes_new, reads_metadata_only, tensors_in


class GradientLayout(Enum):
    """What ranks have of a value's gradient; of a parameter's that is summed, whatever what it meets has."""

    WHOLE = "all of it"
    OWN = "each its own"
    USE = "each that of its own use of a value that is the same on every rank"
    SUMMED = "either"
    UNKNOWN = "unknown"


_MADE = {
    ("all_reduce", "split"): GradientLayout.WHOLE,
    ("all_gather", "split"): GradientLayout.WHOLE,
    ("all_gather", "reduce_scatter"): GradientLayout.USE,
}
"""By the operation, and the backward of a gather; of the others ranks have parts."""


_PARTS = frozenset((GradientLayout.OWN, GradientLayout.USE))
_EVERYWHERE = frozenset((GradientLayout.WHOLE, GradientLayout.USE))  # of values that are the same on every rank

_WRONG = {
    GradientLayout.WHOLE: (
        "{} uses {!r} on a value of which each rank has its own part or use, so each has a part of its gradient; "
        "needs sync('grad', 'all_reduce') of the module that holds it"
    ),
    GradientLayout.SUMMED: (
        "{} uses {!r}, whose gradient a sync sums, on a value whose gradient is the same on every rank, so that one of the two "
        "would be wrong; leave sync('grad', 'all_reduce') out"
    ),
}
"""By what ranks have of the gradient of the parameter."""


class PartialGradients:
    """What ranks have of the gradients of the values in a running forward.

    Args:
        error: Makes the error for the code that runs now.
        is_off: True if nothing is to be refused; all gradients are unknown then.
    """

    def __init__(self, error: Callable[[str], BuildError], is_off: bool = False) -> None:
        self.error, self.is_off = error, is_off
        self.known: Any = WeakIdKeyDictionary()

    def enter(self, module: nn.Module) -> list[RemovableHandle]:
        """Look at what a module is given after its syncs and makes before them, by hooks to be removed when it has returned."""
        syncs, split = list(syncs_of(module)), split_of(module)
        moved = [sync for sync in syncs if sync.mode == "fwd_pre" or (sync.mode, sync.op) == ("bwd_post", "all_reduce")]
        by_hand = any(sync.op == "function" and sync.mode != "fwd_post" for sync in syncs)
        takes_whole = split is not None and split.cut.input == "replicated" and not by_hand

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if moved and moved[-1].mode == "bwd_post":
                for tensor in tensors_in((args, kwargs)) if torch.is_grad_enabled() else ():  # else it is what was given
                    if tensor.requires_grad and self.of(tensor) is not GradientLayout.OWN:
                        self._mark(tensor, GradientLayout.USE)
            elif moved:
                self._moved(moved[-1], (args, kwargs), lambda mark: map_first_input(mark, args, kwargs))
            if takes_whole:
                self._check_given((args, kwargs))

        def check_twice(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad and torch.is_grad_enabled()]
            if any(self.of(tensor) is GradientLayout.USE for tensor in given):
                raise self.error(
                    "sync('bwd_post', 'all_reduce') sums the gradient of what it is given, and a sync before sums it already; "
                    "leave one of them out"
                )

        handles = [module.register_forward_pre_hook(note, with_kwargs=True)] if moved or takes_whole else []
        if any((sync.mode, sync.op) == ("bwd_post", "all_reduce") for sync in syncs):
            handles.append(module.register_forward_pre_hook(check_twice, with_kwargs=True, prepend=True))
        return handles

    def check_sum(self, op: str, x: torch.Tensor) -> torch.Tensor:
        """A sum over ranks that all have the same is that many times too large.

        Raises:
            BuildError: it is.
        """
        if torch.is_grad_enabled() and x.requires_grad and self.of(x) in _EVERYWHERE:
            raise self.error(
                f"sync('fwd_post', {op!r}) adds up what is the same on every rank already: it was reduced or gathered inside, "
                "or is made of what is whole; sync it once"
            )
        return x

    def _check_given(self, given: Any) -> None:
        """A sharded layer returns a part of the gradient of what it is given, and somebody has to sum that."""
        for tensor in tensors_in(given):
            if torch.is_grad_enabled() and tensor.requires_grad and self.of(tensor) is GradientLayout.WHOLE:
                raise self.error(
                    "it returns a part of the gradient of what it is given, and no sync sums that: of an input that is not the "
                    "first, or of what whole parameters made; give sync('bwd_post', 'all_reduce') to this module itself, or "
                    "sync('grad', 'all_reduce') to the module that holds the parameters"
                )

    def leave(self, module: nn.Module, output: Any) -> None:
        """A module has returned: its last sync says what ranks have, or, without one, how it was split."""
        after = list(syncs_of(module, "fwd_post"))
        if after:
            self._moved(after[-1], output, lambda mark: map_output(mark, output))
        elif (split := split_of(module)) is not None:
            for tensor in tensors_in(output):
                self._mark(tensor, GradientLayout.WHOLE if split.cut.output == "whole" else GradientLayout.OWN)

    def returned(self, output: Any) -> Any:
        """What the model returns; a gradient for what was made inside of a sync of gradients is a ``BuildError`` then.

        An auxiliary loss would get one, say. What else the model does with such a value has its gradient as before.
        """
        leaves = pytree.tree_leaves(output)
        if not any(isinstance(leaf, torch.Tensor) and self.of(leaf) is GradientLayout.USE for leaf in leaves):
            return output
        message = str(
            self.error(
                "it returns what is the same on every rank and was made inside of a bwd_post or a gather, which adds its "
                "gradient up; make it outside, give the sync to the sharded layers themselves, or detach it"
            )
        )

        def refuse(grad: torch.Tensor) -> None:
            raise BuildError(message)  # one that was raised before would keep alive what its traceback knows

        def watched(x: torch.Tensor) -> torch.Tensor:
            if not x.requires_grad or self.of(x) is not GradientLayout.USE:
                return x
            x = x.view_as(x)
            x.register_hook(refuse)  # type: ignore[no-untyped-call]
            return x

        return pytree.tree_map_only(torch.Tensor, watched, output)

    def _moved(self, sync: Sync, value: Any, to_moved: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> None:
        """Mark what a sync made; a function may have changed whatever it was given."""
        if sync.op == "function":
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    self._mark(leaf, GradientLayout.UNKNOWN)
        else:
            to_moved(lambda x: self._mark(x, _MADE.get((sync.op, sync.backward), GradientLayout.OWN)))

    def _mark(self, x: torch.Tensor, made: GradientLayout) -> torch.Tensor:
        self.known[x] = made
        return x

    def of(self, x: torch.Tensor) -> GradientLayout | None:
        """What ranks have of the gradient of ``x``; None if there is none."""
        if self.is_off:
            return GradientLayout.UNKNOWN
        if x in self.known:
            return self.known[x]  # type: ignore[no-any-return]
        if not (x.requires_grad and torch.is_grad_enabled()):
            return None
        if overlapped_reduction.reduction_of(x) is not None:
            return GradientLayout.USE
        if not isinstance(x, nn.Parameter):
            return GradientLayout.UNKNOWN
        return GradientLayout.OWN if is_sharded(x) else GradientLayout.SUMMED if reduces_gradient(x) else GradientLayout.WHOLE

    def call(
        self, func: Callable[..., Any], tensors: Sequence[torch.Tensor], is_ours: Callable[[], bool]
    ) -> GradientLayout | BuildError | None:
        """What ranks have of the results of a torch function outside of sharded modules that is about to be called.

        It is an error if it is given what has the whole gradient, and what has a part of it or is summed.
        """
        name = name_of(func)
        if not torch.is_grad_enabled() or is_metadata(func, name) or name.endswith("_like") or makes_new(name):
            return None
        given = [(tensor, self.of(tensor)) for tensor in (tensors[:1] if reads_metadata_only(name) else tensors)]
        found = {gradient for _, gradient in given} - {None}
        if found and is_ours():
            return GradientLayout.UNKNOWN
        if GradientLayout.WHOLE in found and GradientLayout.UNKNOWN not in found and found & {*_PARTS, GradientLayout.SUMMED}:
            wrong = GradientLayout.WHOLE if found & _PARTS else GradientLayout.SUMMED
            return self.error(_wrong(name, wrong, next(tensor for tensor, gradient in given if gradient is wrong)))
        return next((kind for kind in (GradientLayout.UNKNOWN, *GradientLayout) if kind in found), None)

    def start(self, x: torch.Tensor, is_whole: bool) -> None:
        """The model asks for the gradient of a value that has none as yet, as it does of frozen embeddings."""
        if x not in self.known and not isinstance(x, nn.Parameter):
            self._mark(x, GradientLayout.WHOLE if is_whole else GradientLayout.UNKNOWN)

    def note(self, result: Any, gradient: GradientLayout | BuildError | None, tensors: Iterable[torch.Tensor]) -> None:
        """Mark what the function returned; numbers taken out of the graph of autograd have no gradient any more.

        Raises:
            BuildError: that the call was found to be, if what it returned has a gradient.
        """
        if isinstance(gradient, BuildError):
            if any(tensor.requires_grad for tensor in tensors_in(result)):
                raise gradient
            return
        left = any(tensor.requires_grad for tensor in tensors)
        for tensor in tensors_in(result) if gradient is not None else ():
            if tensor.requires_grad or (tensor.is_floating_point() and not left):
                self.known[tensor] = gradient


def _wrong(name: str, gradient: GradientLayout, x: torch.Tensor) -> str:
    if isinstance(x, nn.Parameter):
        return _WRONG[gradient].format(name, " = ".join(parameter_facts(x).names) or f"a parameter of shape {tuple(x.shape)}")
    if gradient is GradientLayout.SUMMED:
        return _WRONG[gradient].format(name, "a value made of a parameter")
    return (
        f"{name} puts a value whose gradient is the same on every rank together with one of which each rank has its own part "
        "or use, so one gradient is wrong; give bwd_post or the gather to the sharded layers themselves, reduce or gather "
        "before, or, if it is made of a parameter, sync('grad', 'all_reduce') of the module that holds that"
    )
