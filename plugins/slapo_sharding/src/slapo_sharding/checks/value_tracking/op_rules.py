"""Questions to torch's rules about functions that ranks call part by part, asked once for identical layers.

A question holds all that the answer depends on and nothing that has numbers, so the answers are remembered by the process.
Where random numbers have to decide and the function was also given a tensor that is not followed, a mask, say, the answer
depends on that tensor's numbers: then only what the rules say is remembered. What torch's rules refuse is not remembered.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.utils import _pytree as pytree

from slapo_tracing.nodes import name_of

from ...communication._torch_autograd import no_functions
from ...communication._torch_private import REDISTRIBUTION_WORDS, fake_mesh, no_modes, no_redistribution
from ...planning.dry_run.node_values import view_in_two_steps
from . import partial_sums as sums
from .numeric_probe import MixesShards, probe
from .tracked_value import Layout, from_dtensor, tensors_in

GIVEN_SIZES = frozenset("view reshape expand unflatten layer_norm rms_norm".split())
_VIEWS = frozenset("view reshape unflatten".split())
PICKS = frozenset("select index_select narrow".split())
_PRODUCTS = frozenset("matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm linear".split())
_TELLING = (type(None), bool, int, float, complex, str, types.EllipsisType, torch.dtype, torch.device, torch.layout)
_SIMPLE = frozenset((*_TELLING, torch.memory_format, Layout))
_COUNT = "give the size of each one and -1 for their number, or call tensor_parallel(), which finds out"
_MOST = 4096

Attempt = tuple[Any, ...]
"""Arguments one by one for all ranks' values together."""

SAME = "the same on every rank"
Outcome = Layout | int | str | None
"""Layout of a result, or the dimension it is sharded along; ``SAME``; None where it may be anything."""


class Slice(NamedTuple):
    """A ``slice``; those cannot be remembered before Python 3.12."""

    start: Any
    stop: Any
    step: Any


class UndecidedByRules(NamedTuple):
    """Numbers decide: arguments that torch's rules say take data of other ranks."""

    moved: tuple[Attempt, ...]


@dataclass(frozen=True)
class OpCall:
    """A call of a torch function with sharded values, as it was before it changed any.

    Args:
        func: The function.
        leaves: The arguments one by one, with layouts in the place of tensors.
        kinds: Their types: numbers of different types can be equal.
        spec: How the arguments are put together.
        of: The layout of a sharded one.
        results: Shape and device of each tensor that this rank got.
        reduced: Whether a module that runs adds up what it returns over the ranks.
        counted: Whether a module that runs is known to count this rank's part.
        around: See ``surroundings``.
    """

    func: Callable[..., Any]
    leaves: tuple[Any, ...]
    kinds: tuple[type, ...]
    spec: Any
    of: Layout
    results: tuple[tuple[tuple[int, ...], torch.device], ...]
    reduced: bool
    counted: bool
    around: tuple[Any, ...] | None

    @property
    def name(self) -> str:
        """Of the function."""
        return name_of(self.func)

    @property
    def is_telling(self) -> bool:
        """Whether the answer follows from the question, and the question can be told from others."""
        return self.around is not None and _is_torchs(self.func) and all(map(_is_simple, self.leaves))

    @property
    def contracts(self) -> bool:
        """Whether it is a product that adds up along a sharded dimension."""
        args, _ = pytree.tree_unflatten(list(self.leaves), self.spec)
        products = _contracted(self.name, args)
        return any(isinstance(value, Layout) and value.placement and value.dim == dim for value, dim in products)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Call the function with these arguments."""
        args, kwargs = pytree.tree_unflatten([slice(*leaf) if type(leaf) is Slice else leaf for leaf in leaves], self.spec)
        made = self.func(*args, **kwargs)
        return args[0] if made is None and args else made

    def attempts(self) -> Iterator[Attempt]:
        """Arguments for all ranks' values together: as they are, or, as of a view, with a size of this rank's multiplied."""
        yield self.leaves
        for place, leaf in enumerate(self.leaves) if self.name in GIVEN_SIZES else ():
            if type(leaf) is int and leaf > 0:
                yield (*self.leaves[:place], leaf * self.of.ranks, *self.leaves[place + 1 :])


def result_layouts(question: OpCall, numbers: Mapping[int, torch.Tensor]) -> Sequence[Outcome]:
    """What the results are, in their order; those that are left out may be anything.

    Args:
        question: The call.
        numbers: Place to tensor, of the arguments that are not followed.

    Raises:
        Mixed: it needs the parts of other ranks.
    """
    with torch.no_grad(), no_functions(), no_modes():  # a checkpoint that counts operators, say, must not count these
        if question.of.placement is not None and question.of.placement.is_partial():
            return sums.probe_partial(question, numbers, SAME)
        answer = cached_layouts(question) if question.is_telling else cached_layouts.__wrapped__(question)
        return decide(question, answer.moved, numbers) if isinstance(answer, UndecidedByRules) else answer


@lru_cache(maxsize=_MOST)
def cached_layouts(question: OpCall) -> Sequence[Outcome] | UndecidedByRules:
    """What follows from the question alone."""
    made, moved = _by_rules(question, OpCall.run)
    if question.name in ("view", "reshape") and not any(_fits(value, question) for _, value in made):
        made += _by_rules(question, _in_two_steps)[0]
    fits: dict[Any, tuple[Attempt, Any]] = {}
    summed = False
    for attempt, value in made:
        placements = [layout.placements[0] for layout in tensors_in(value) if isinstance(layout, DTensor)]
        if any(placement.is_partial() for placement in placements):
            sums = question.reduced and all(map(_is_sum, placements))
            summed, moved = summed or sums, moved if sums else [*moved, attempt]
        elif _fits(value, question):
            fits.setdefault(tuple(placements), (attempt, value))
    if len(fits) == 1:  # of one head it is not known whether it is the heads or their width that are sharded
        ((attempt, value),) = fits.values()
        _check_count(question, attempt, value)
        return _outcomes(value, question)
    if fits or summed:
        return ()
    is_given_numbers = any(_is_plain(leaf) for leaf in question.leaves)
    return UndecidedByRules(tuple(moved)) if is_given_numbers else decide(question, moved, {})


def _check_count(question: OpCall, attempt: Attempt, made: Any) -> None:
    """A size that may be all ranks' number of heads must not be taken for this rank's.

    What is a multiple of the sharded dimension was read off it.

    Raises:
        Mixed: all ranks together could call it with these very arguments, and would get something else.
    """
    of = question.of
    changed = [leaf for leaf, other in zip(question.leaves, attempt, strict=True) if leaf is not other]
    if question.name not in _VIEWS or question.counted or not changed or changed[0] % of.shape[of.dim] == 0:
        return
    try:
        leaves = [torch.empty(leaf.whole[0], device="meta") if isinstance(leaf, Layout) else leaf for leaf in question.leaves]
        whole = question.run(leaves)
    except RuntimeError:  # it is no view of the whole
        return
    if [value.shape for value in tensors_in(whole)] != [value.shape for value in tensors_in(made)]:
        raise MixesShards(f"{question.name} is given {changed[0]}, which may be the number for all ranks or for one", _COUNT)


def _by_rules(
    question: OpCall, call: Callable[[OpCall, Sequence[Any]], Any]
) -> tuple[list[tuple[Attempt, Any]], list[Attempt]]:
    """What torch's rules make of each attempt, and those for which data of other ranks would have to be sent."""
    made, moved, mesh = [], [], fake_mesh(question.of.ranks)
    with warnings.catch_warnings(), no_redistribution():
        warnings.simplefilter("ignore")
        for attempt in question.attempts():
            try:
                made.append((attempt, call(question, [_for_rules(leaf, mesh) for leaf in attempt])))
            except Exception as err:  # torch's rules raise all kinds of errors for what they cannot do
                moved += [attempt] if any(word in str(err) for word in REDISTRIBUTION_WORDS) else []
    return made, moved


def _in_two_steps(question: OpCall, leaves: Sequence[Any]) -> Any:
    args, kwargs = pytree.tree_unflatten([*leaves], question.spec)
    if kwargs or not isinstance(args[0], DTensor):
        raise RuntimeError("DTensor has no rule")
    return view_in_two_steps(question.name, *args)


def decide(question: OpCall, moved: Sequence[Attempt], numbers: Mapping[int, torch.Tensor]) -> Sequence[Outcome]:
    """See with random numbers whether ranks compute parts of what all together would.

    Raises:
        Mixed: they do not.
    """
    dims: list[int | None] = []
    picks = question.name in PICKS | {"__getitem__"}
    if picks and min(len(shape) for shape, _ in question.results) < len(question.of.shape):
        return ()  # one head after the other
    mixed = question.contracts and not question.reduced
    for attempt in moved:
        try:
            dims = dims or probe(question, attempt, numbers)
        except MixesShards:
            mixed = True
    if mixed and not dims:
        raise MixesShards(f"{question.name} needs all of it")
    return [SAME if dim is None else dim for dim in dims]


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) or (isinstance(leaf, Layout) and leaf.placement is None)


def _is_sum(placement: Placement) -> bool:
    """Whether the sum over the ranks makes it whole, where it is not."""
    return not placement.is_partial() or (type(placement) is Partial and placement.reduce_op == "sum")


def _for_rules(leaf: Any, mesh: Any) -> Any:
    if isinstance(leaf, Layout):
        return leaf.empty(mesh)
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _fits(made: Any, question: OpCall) -> bool:
    """Whether these are the layouts of what this rank got."""
    layouts = [layout.to_local() if isinstance(layout, DTensor) else layout for layout in tensors_in(made)]
    return [layout.shape for layout in layouts] == [shape for shape, _ in question.results]


def _outcomes(made: Any, question: OpCall) -> list[Outcome]:
    found: list[Outcome] = []
    of = question.of
    for layout, (shape, device) in zip(tensors_in(made), question.results, strict=True):
        if not isinstance(layout, DTensor) or layout.placements[0].is_replicate():
            found.append(SAME)
        elif not of.blocks or (layout.placements == (of.placement,) and shape[of.dim] == sum(of.blocks)):
            found.append(from_dtensor(layout, device, of.blocks))
        else:
            found.append(None)
    return found


def _contracted(name: str, args: Any) -> list[tuple[Any, int]]:
    """What a product adds up along: tensors, and the dimension of each."""
    left, right = args[1:3] if name in ("addmm", "baddbmm") and len(args) > 2 else (*args, None, None)[:2]
    if name not in _PRODUCTS or not all(isinstance(factor, (Layout, torch.Tensor)) for factor in (left, right)):
        return []
    if name == "__rmatmul__":
        left, right = right, left
    last = len(right.shape) - 1
    return [(left, len(left.shape) - 1), (right, last if name == "linear" else max(last - 1, 0))]


def _is_torchs(func: Any) -> bool:
    """Whether what a function does is torch's own, and not that of code which may read anything."""
    if isinstance(func, types.MethodWrapperType):  # the getter of a property
        func = func.__self__
    owner = getattr(func, "__objclass__", func)
    return isinstance(func, _FUNCTIONS) and str(getattr(owner, "__module__", "")).partition(".")[0] == "torch"


_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
)


def _is_simple(leaf: Any) -> bool:
    return type(leaf) in _SIMPLE or (type(leaf) is Slice and all(type(part) in (int, type(None)) for part in leaf))
