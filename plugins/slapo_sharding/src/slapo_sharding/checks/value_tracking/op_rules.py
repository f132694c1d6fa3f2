"""DTensor's rules for functions that ranks call on shards; identical layers are analysed once.

An ``OpCall`` holds everything that the answer depends on and no data, so the process caches the answers. If a numeric probe has
to decide and the function also takes an untracked tensor, such as a mask, the answer depends on that tensor's values; then only
the answer of the rules is cached. Calls that torch's rules refuse are not cached.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.utils import _pytree as pytree

from ...communication._torch_autograd import no_functions
from ...communication._torch_private import REDISTRIBUTION_WORDS, fake_mesh, no_modes, no_redistribution
from ...planning.dry_run.node_values import view_in_two_steps
from .numeric_probe import MixesShards, probe, probe_partial
from .tracked_value import SAME, Attempt, Layout, OpCall, Outcome, from_dtensor, tensors_in

_VIEWS = frozenset("view reshape unflatten".split())
PICKS = frozenset("select index_select narrow".split())
_COUNT = "give the size of each one and -1 for their number, or call tensor_parallel(), which finds out"
_MOST = 4096


class UndecidedByRules(NamedTuple):
    """Undecided by DTensor's rules: the attempts that would redistribute data. A numeric probe decides."""

    moved: tuple[Attempt, ...]


def result_layouts(call: OpCall, numbers: Mapping[int, torch.Tensor]) -> Sequence[Outcome]:
    """Return the layouts of the results in order; missing ones are unknown.

    Raises:
        MixesShards: the function needs other ranks' shards.
    """
    with torch.no_grad(), no_functions(), no_modes():  # a checkpoint that counts operators must not count these
        if call.of.placement is not None and call.of.placement.is_partial():
            return probe_partial(call, numbers)
        answer = cached_layouts(call) if call.is_cacheable else cached_layouts.__wrapped__(call)
        return probe_call(call, answer.moved, numbers) if isinstance(answer, UndecidedByRules) else answer


@lru_cache(maxsize=_MOST)
def cached_layouts(call: OpCall) -> Sequence[Outcome] | UndecidedByRules:
    """Return the answer that depends on the call alone."""
    made, moved = _by_rules(call, OpCall.run)
    if call.name in ("view", "reshape") and not any(_fits(value, call) for _, value in made):
        made += _by_rules(call, _in_two_steps)[0]
    fits: dict[Any, tuple[Attempt, Any]] = {}
    summed = False
    for attempt, value in made:
        placements = [layout.placements[0] for layout in tensors_in(value) if isinstance(layout, DTensor)]
        if any(placement.is_partial() for placement in placements):
            sums = call.reduced and all(map(_is_sum, placements))
            summed, moved = summed or sums, moved if sums else [*moved, attempt]
        elif _fits(value, call):
            fits.setdefault(tuple(placements), (attempt, value))
    if len(fits) == 1:  # with one head, either the heads or their width may be sharded
        ((attempt, value),) = fits.values()
        _check_count(call, attempt, value)
        return _outcomes(value, call)
    if fits or summed:
        return ()
    numbers = (torch.Tensor, Layout)
    is_given_numbers = any(isinstance(leaf, numbers) and getattr(leaf, "placement", None) is None for leaf in call.leaves)
    return UndecidedByRules(tuple(moved)) if is_given_numbers else probe_call(call, moved, {})


def _check_count(call: OpCall, attempt: Attempt, made: Any) -> None:
    """Refuse a size in a view that may be the global or the local number of heads.

    A multiple of the sharded dimension's local size was read from the value, and is right.

    Raises:
        MixesShards: the same arguments also fit the global value, with another result.
    """
    of = call.of
    changed = [leaf for leaf, other in zip(call.leaves, attempt, strict=True) if leaf is not other]
    if call.name not in _VIEWS or call.counted or not changed or changed[0] % of.shape[of.dim] == 0:
        return
    try:
        leaves = [torch.empty(leaf.whole[0], device="meta") if isinstance(leaf, Layout) else leaf for leaf in call.leaves]
        whole = call.run(leaves)
    except RuntimeError:  # it is not a view of the whole
        return
    if [value.shape for value in tensors_in(whole)] != [value.shape for value in tensors_in(made)]:
        raise MixesShards(f"{call.name} is given {changed[0]}, which may be the number for all ranks or for one", _COUNT)


def _by_rules(call: OpCall, run: Callable[[OpCall, Sequence[Any]], Any]) -> tuple[list[tuple[Attempt, Any]], list[Attempt]]:
    """Return the results of the attempts by torch's rules, and the attempts that would redistribute data."""
    made, moved, mesh = [], [], fake_mesh(call.of.ranks)
    with warnings.catch_warnings(), no_redistribution():
        warnings.simplefilter("ignore")
        for attempt in call.attempts():
            try:
                made.append((attempt, run(call, [_rule_argument(leaf, mesh) for leaf in attempt])))
            except Exception as err:  # torch's rules raise all kinds of errors for what they cannot do
                moved += [attempt] if any(word in str(err) for word in REDISTRIBUTION_WORDS) else []
    return made, moved


def _in_two_steps(call: OpCall, leaves: Sequence[Any]) -> Any:
    args, kwargs = pytree.tree_unflatten([*leaves], call.spec)
    if kwargs or not isinstance(args[0], DTensor):
        raise RuntimeError("DTensor has no rule")
    return view_in_two_steps(call.name, *args)


def probe_call(call: OpCall, moved: Sequence[Attempt], numbers: Mapping[int, torch.Tensor]) -> Sequence[Outcome]:
    """Decide by a numeric probe if ranks compute shards of the global result; raise ``MixesShards`` if they do not."""
    dims: list[int | None] = []
    picks = call.name in PICKS | {"__getitem__"}
    if picks and min(len(shape) for shape, _ in call.results) < len(call.of.shape):
        return ()  # one head after the other
    mixed = call.contracts and not call.reduced
    for attempt in moved:
        try:
            dims = dims or probe(call, attempt, numbers)
        except MixesShards:
            mixed = True
    if mixed and not dims:
        raise MixesShards(f"{call.name} needs the whole value")
    return [SAME if dim is None else dim for dim in dims]


def _is_sum(placement: Placement) -> bool:
    """Return whether a value of this placement is complete, or becomes complete by a sum over the ranks."""
    return not placement.is_partial() or (type(placement) is Partial and placement.reduce_op == "sum")


def _rule_argument(leaf: Any, mesh: Any) -> Any:
    if isinstance(leaf, Layout):
        return leaf.empty(mesh)
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _fits(made: Any, call: OpCall) -> bool:
    """Return whether the local shapes are those that this rank got."""
    layouts = [layout.to_local() if isinstance(layout, DTensor) else layout for layout in tensors_in(made)]
    return [layout.shape for layout in layouts] == [shape for shape, _ in call.results]


def _outcomes(made: Any, call: OpCall) -> list[Outcome]:
    found: list[Outcome] = []
    of = call.of
    for layout, (shape, device) in zip(tensors_in(made), call.results, strict=True):
        if not isinstance(layout, DTensor) or layout.placements[0].is_replicate():
            found.append(SAME)
        elif not of.blocks or (layout.placements == (of.placement,) and shape[of.dim] == sum(of.blocks)):
            found.append(from_dtensor(layout, device, of.blocks))
        else:
            found.append(None)
    return found
