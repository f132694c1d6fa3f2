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

from slapo_core.errors import BuildError
from slapo_core.parameters import facts, is_part
from slapo_core.tracing.calls import is_metadata, name_of

from . import started
from .followed import tensors_in
from .rules import split_of
from .syncing import REDUCING, Sync, map_input, map_output, sums_gradient, syncs_of


class Gradient(Enum):
    """What ranks have of a value's gradient; of a parameter's that is summed, whatever what it meets has."""

    WHOLE = "all of it"
    OWN = "each its own"
    SUMMED = "either"
    UNKNOWN = "unknown"


_MADE = {"all_reduce": Gradient.WHOLE, "split": Gradient.WHOLE}
"""By the operation, or the backward of a gather; of the others ranks have parts."""


_AS = frozenset("to type_as expand_as view_as reshape_as".split())
"""Functions that look at another tensor's type or shape only."""

_LIKE = ("_like", "new_")
"""In the names of functions that make a tensor of the type or shape of another."""


class OwnGradients:
    """What ranks have of the gradients of the values in a running forward.

    Args:
        error: Makes the error for the code that runs now.
    """

    def __init__(self, error: Callable[[str], BuildError]) -> None:
        self.error = error
        self.known: Any = WeakIdKeyDictionary()

    def enter(self, module: nn.Module) -> list[RemovableHandle]:
        """Look at what a module is given after its syncs and makes before them, by hooks to be removed when it has returned."""
        syncs, split = list(syncs_of(module)), split_of(module)
        moved = [sync for sync in syncs if sync.mode == "fwd_pre" or (sync.mode, sync.op) == ("bwd_post", "all_reduce")]
        by_hand = any(sync.op == "function" and sync.mode != "fwd_post" for sync in syncs)
        takes_whole = split is not None and split.cut.input == "replicated" and not by_hand
        after = [sync.op for sync in syncs if sync.mode == "fwd_post"]

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if moved and moved[-1].mode == "bwd_post":
                for tensor in tensors_in((args, kwargs)):
                    if tensor.requires_grad:
                        self._mark(tensor, Gradient.OWN)
            elif moved:
                self._moved(moved[-1], (args, kwargs), lambda mark: map_input(mark, args, kwargs))
            if takes_whole:
                self._check_given((args, kwargs))

        def check_sum(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            map_output(lambda x: self._check_sum(x, after[0]), output)

        handles = [module.register_forward_pre_hook(note, with_kwargs=True)] if moved or takes_whole else []
        if after and after[0] in REDUCING and split is None:
            handles.append(module.register_forward_hook(check_sum, prepend=True))
        return handles

    def _check_sum(self, x: torch.Tensor, op: str) -> torch.Tensor:
        """A sum over ranks that all have the same is that many times too large."""
        if torch.is_grad_enabled() and x.requires_grad and self.of(x) is Gradient.WHOLE:
            raise self.error(
                f"sync('fwd_post', {op!r}) adds up what is the same on every rank already: it was reduced or gathered inside, "
                "or is made of what is whole; sync it once"
            )
        return x

    def _check_given(self, given: Any) -> None:
        """A sharded layer returns a part of the gradient of what it is given, and somebody has to sum that."""
        for tensor in tensors_in(given):
            if torch.is_grad_enabled() and tensor.requires_grad and self.of(tensor) is Gradient.WHOLE:
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
        elif split_of(module) is not None:
            for tensor in tensors_in(output):
                self._mark(tensor, Gradient.OWN)

    def _moved(self, sync: Sync, value: Any, to_moved: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> None:
        """Mark what a sync made; a function may have changed whatever it was given."""
        if sync.op == "function":
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    self._mark(leaf, Gradient.UNKNOWN)
        else:
            to_moved(lambda x: self._mark(x, _MADE.get(sync.backward if sync.op == "all_gather" else sync.op, Gradient.OWN)))

    def _mark(self, x: torch.Tensor, made: Gradient) -> torch.Tensor:
        self.known[x] = made
        return x

    def of(self, x: torch.Tensor) -> Gradient | None:
        """What ranks have of the gradient of ``x``; None if there is none."""
        if x in self.known:
            return self.known[x]  # type: ignore[no-any-return]
        if not (x.requires_grad and torch.is_grad_enabled()):
            return None
        if started.of(x) is not None:
            return Gradient.OWN
        if not isinstance(x, nn.Parameter) or not facts(x).names:  # an engine may have put it in the place of the one summed
            return Gradient.UNKNOWN
        return Gradient.OWN if is_part(x) else Gradient.SUMMED if sums_gradient(x) else Gradient.WHOLE

    def call(
        self, func: Callable[..., Any], tensors: Sequence[torch.Tensor], is_ours: Callable[[], bool]
    ) -> Gradient | BuildError | None:
        """What ranks have of the results of a torch function outside of sharded modules that is about to be called.

        It is an error if it is given what has the whole gradient, and what has a part of it.
        """
        name = name_of(func)
        if not torch.is_grad_enabled() or is_metadata(func, name) or any(like in name for like in _LIKE):
            return None
        given = [(tensor, self.of(tensor)) for tensor in (tensors[:1] if name in _AS else tensors)]
        found = {gradient for _, gradient in given} - {None}
        if found and is_ours():
            return Gradient.UNKNOWN
        if {Gradient.OWN, Gradient.WHOLE} <= found and Gradient.UNKNOWN not in found:
            return self.error(_wrong(name, next(tensor for tensor, gradient in given if gradient is Gradient.WHOLE)))
        return next((kind for kind in (Gradient.UNKNOWN, *Gradient) if kind in found), None)

    def note(self, result: Any, gradient: Gradient | BuildError | None, tensors: Iterable[torch.Tensor]) -> None:
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


def _wrong(name: str, x: torch.Tensor) -> str:
    if isinstance(x, nn.Parameter):
        label = " = ".join(facts(x).names)
        return (
            f"{name} uses {label!r} on a value of which each rank has its own part or use, so each has a part of its gradient; "
            "needs sync('grad', 'all_reduce') of the module that holds it"
        )
    return (
        f"{name} puts a value whose gradient is the same on every rank together with one of which each rank has its own part "
        "or use, so one gradient is wrong; give bwd_post or the gather to the sharded layers themselves, reduce or gather "
        "before, or, if it is made of a parameter, sync('grad', 'all_reduce') of the module that holds that"
    )
