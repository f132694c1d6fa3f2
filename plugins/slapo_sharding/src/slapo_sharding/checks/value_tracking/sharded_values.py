"""Code between layers that mixes what ranks hold in parts: found at the first run.

What comes out of a module that is split along its output, or of a sync that cuts it up, is followed through the torch
functions that the model calls, with torch's own rules as the types, as a dry run does (see ``layouts``). A softmax or a sum
along the sharded dimension, a fused output that is not taken apart as it was split, a layer that is given other parts than
its own: each rank would compute something, and it would be wrong. Torch's rules refuse some of what ranks can do, too:
random numbers decide then (``trial``), as they do for parts of a sum (``sums``). It is an error where what was mixed goes
into a layer that is split, is added up over the ranks, or leaves the model; to look at it is none. What has no rule, and
what collectives return, is not followed further.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from slapo_core import BuildError, ShardSpec, get_logger
from slapo_tracing.nodes import in_function_transform, is_metadata, name_of

from ...communication._torch_private import fake_mesh, global_state
from ...communication.collectives import Group, num_ranks
from ...planning.dry_run.function_probe import check_parts
from ...planning.dry_run.fused_sizes import index_bounds
from ...rules.sharding_rule import AppliedCut, split_of
from ...splitting.attention_heads import counts_locally
from ...syncs.sync_hooks import REDUCING, Sync, first_input, map_first_input, map_output, syncs_of
from .numeric_probe import MixesShards
from .op_rules import GIVEN_SIZES, PICKS, SAME, OpCall, Outcome, Slice, result_layouts
from .partial_sums import REDUCE, partial_value
from .rng_agreement import GeneratorSnapshot
from .tracked_value import Layout, TrackedValue, sharded, tensors_in, untracked

_GATHER = (
    "gather it there, sync('fwd_post', 'all_gather', axis=-1), with what follows whole, leave it whole too, "
    "or split this as well"
)
_FORK = "call fork_rng() of this module or of one around it"
_SEED = "seed the ranks alike, set_random_seed(seed, tp_rank=...) does, or call fork_rng() where each has a part"
_SUMMING = (*REDUCING, "function")
_CHANGING = ("all_to_all", "function")
_CUTTING = ("scatter", "reduce_scatter")
_SPLITS = frozenset("split chunk tensor_split split_with_sizes unsafe_chunk unsafe_split".split())


class ShardedValues:
    """The sharded values of a running forward.

    Args:
        error: Makes the error of a check, by name, for a layer whose output is mixed, with a reason and a remedy, in the code
            that runs now.
        group: The ranks that share out the model; None where nobody has a part.
        device: Where their parts are.
        disabled: Names of checks that are off. Other checks need the values, so that they are tracked all the same.
    """

    def __init__(
        self,
        error: Callable[[str, nn.Module | None, str, str], BuildError],
        group: Group,
        device: torch.device,
        disabled: Collection[str] = (),
    ) -> None:
        self.error = error
        self.device = device
        self.checks_values, self.checks_random = "values" not in disabled, "random" not in disabled
        self.unasked = group if self.checks_random else None
        """Ranks whose random state for values that are the same on all of them was not compared yet; None once it was."""
        self.known: Any = WeakIdKeyDictionary()
        """Tensor to what it is: an error if it is mixed, None if it may be anything; others are the same on every rank."""

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called: one that is split must be given what it was split for.

        Raises:
            BuildError: it is not.
        """
        applied, x = split_of(module), first_input(args, kwargs)
        value = self.known.get(x) if x is not None else None
        if not self.checks_values or applied is None or x is None or value is None or any(syncs_of(module, "fwd_pre")):
            return
        if isinstance(value, BuildError):
            raise value
        if value.is_part_of_sum:
            raise self._mixed(value, f"a {type(module).__name__} that is split is given a part of a sum", REDUCE)
        kind, blocks = type(module).__name__, tuple(block * applied.spec.num_shards for block in value.layout.blocks)
        if applied.cut.input != "sharded":
            raise self._mixed(value, f"a {kind} that is split along its output is given a part of its input")
        if type(value.layout.placement) is not Shard:
            raise self._mixed(value, f"a {kind} that is split is given parts in another order")
        expected = applied.cut.dim % x.dim(), _blocks(applied)
        if (found := (value.layout.dim, blocks)) != expected:
            given, wanted = (f"{list(sizes) or 'one block'} along {dim}" for dim, sizes in (found, expected))
            raise self._mixed(value, f"a {kind} that is split in {wanted} is given {given}")

    def given(self, module: nn.Module) -> list[RemovableHandle]:
        """Follow what a sync of the module cuts off its input, by a hook to be removed when it has returned."""
        syncs = list(syncs_of(module, "fwd_pre"))
        if not syncs or syncs[-1].op not in _CUTTING:
            return []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            map_first_input(partial(self._start_part, module, syncs[-1]), args, kwargs)

        return [module.register_forward_pre_hook(note, with_kwargs=True)]

    def leave(self, module: nn.Module, output: Any, last: bool, is_whole: bool) -> None:
        """A module has returned: what is split along its output returns a sharded value.

        Raises:
            BuildError: it is the ``last`` one to return, and returns what is mixed; or ``is_whole`` the model, and returns a
                part of a sum.
        """
        applied, syncs = split_of(module), list(syncs_of(module, "fwd_post"))
        if any(sync.op in _CHANGING for sync in syncs):
            self._lose(output)
        for known in self._of(_tensors(output)) if last else ():
            if isinstance(known, BuildError):
                raise known
            if self.checks_values and is_whole and known is not None and known.is_part_of_sum:
                raise self._mixed(known, "it returns a part of a sum that nobody adds up", REDUCE)
        if syncs:
            if syncs[-1].op in _CUTTING:
                map_output(partial(self._start_part, module, syncs[-1]), output)
        elif applied is not None and applied.cut.output == "partial":
            map_output(partial(self._start_sum, module, applied.spec), output)
        elif applied is not None and not applied.gathered and applied.cut.output == "sharded":
            map_output(partial(self._start, module, applied), output)

    def _start(self, module: nn.Module, applied: AppliedCut, x: torch.Tensor) -> torch.Tensor:
        ranks = applied.spec.num_shards
        if applied.spec.dealt is not None:
            self.known[x] = None
        else:
            blocks = tuple(block // ranks for block in _blocks(applied))
            self.known[x] = TrackedValue(sharded(x, applied.cut.dim % x.dim(), ranks, blocks), module, applied.spec.group)
        return x

    def _start_sum(self, module: nn.Module, spec: ShardSpec, x: torch.Tensor) -> torch.Tensor:
        self.known[x] = TrackedValue(partial_value(x, spec.num_shards), module, spec.group)
        return x

    def _start_part(self, module: nn.Module, sync: Sync, x: torch.Tensor) -> torch.Tensor:
        """Track the part that a sync has cut along a dimension, of the sequence say."""
        assert sync.axis is not None
        self.known[x] = TrackedValue(sharded(x, sync.axis % x.dim(), num_ranks(sync.group)), module, sync.group)
        return x

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """A sync is about to add up this value.

        Raises:
            BuildError: it is mixed.
        """
        if isinstance(known := self.known.get(x), BuildError):
            raise known
        return x

    def are_mixed(self, result: Any) -> bool:
        """Return whether any tensor that a function returned must not be used."""
        return any(isinstance(known, BuildError) for known in self._of(tensors_in(result)))

    def _of(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        found = (self.known.get(tensor, SAME) for tensor in tensors)
        return [known for known in found if known is not SAME]

    def _lose(self, value: Any, known: BuildError | None = None) -> None:
        for tensor in _tensors(value):
            self.known[tensor] = known

    def call(
        self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], running: Sequence[nn.Module]
    ) -> Any:
        """Call a torch function that is given these tensors; what it makes of sharded values is followed.

        Raises:
            BuildError: torch cannot do it with this rank's part, or it draws the same random numbers on all ranks.
        """
        name = name_of(func)
        values = self._of(tensors)
        if split_of(running[-1]) or is_metadata(func, name):
            return func(*args, **kwargs)
        if not values:
            return self._run_whole(func, args, kwargs)
        mixed = next((value for value in values if isinstance(value, BuildError)), None)
        if mixed or None in values or is_called_by_sharding():
            try:
                result = func(*args, **kwargs)
            except RuntimeError as err:  # sizes that do not fit are those of what was mixed before
                if mixed is not None and not is_called_by_sharding():
                    raise mixed from err
                raise
            self._lose(result, mixed)
            return result
        value = next((value for value in values if value.layout.blocks or value.is_part_of_sum), values[0])
        given, around = self._given(name, args, kwargs), global_state(value.layout.device)
        run = self._run_whole if value.is_part_of_sum else partial(self._run, value)
        result = run(func, args, kwargs)
        changed = args[0] if result is None and args else result
        self._lose(result)
        inside = running[-1].modules() if isinstance(running[-1], fx.GraphModule) else ()  # it has what these counted
        counted = any(map(counts_locally, (*running, *inside)))
        reduced = any(sync.op in _SUMMING for module in running for sync in syncs_of(module, "fwd_post"))
        try:
            if not self._take_apart(name, args, changed, value):
                shapes = tuple((tensor.shape, tensor.device) for tensor in tensors_in(changed))
                question = OpCall(func, given.leaves, given.kinds, given.spec, value.layout, shapes, reduced, counted, around)
                self._note(changed, result_layouts(question, given.numbers), value)
        except MixesShards as err:
            self._lose(changed, self._mixed(value, *err.args) if self.checks_values else None)
        except Exception as err:  # whatever code gives to torch: the check must not be what fails
            get_logger().debug("what %s returns is not followed: %s", name, err)
        return result

    def applied(self, function: Any, args: tuple[Any, ...], result: Any) -> None:
        """An autograd function has returned: its backward on parts has to give parts of what it gives on all."""
        given = self._of(tensors_in(args))
        values = [
            each for each in given if isinstance(each, TrackedValue) and not each.is_part_of_sum and not each.layout.blocks
        ]
        if not values or len(values) < len(given):
            return
        value, ranks = values[0], values[0].layout.ranks

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            known = self.known.get(leaf)
            like = value if known is None and leaf.shape == value.layout.shape else None
            layout = known.layout if isinstance(known, TrackedValue) else untracked(leaf) if like is None else like.layout
            return layout.empty(fake_mesh(ranks))

        try:
            given_all, made = pytree.tree_map(stand_in, (args, result))
            check_parts(function.apply, given_all, {}, made, ranks)
        except ValueError:
            name = function.__name__
            why = f"{name} needs all of it, or its backward all of the gradient"
            self._lose(result, self._mixed(value, why) if self.checks_values else None)

    def call_of(self, module: nn.Module, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a torch function that is part of the forward of a module that is split, where a graph has that forward.

        Raises:
            BuildError: the module is given what it was not split for.
        """
        value = self.known.get(first_input(args, kwargs))
        if not isinstance(value, TrackedValue) or value.owner is not module:
            self.enter(module, args, kwargs)
        result = func(*args, **kwargs)
        self.leave(module, result, last=False, is_whole=False)
        return result

    def _run_whole(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the function with what is the same on every rank; what is drawn for it first has to be, too."""
        draw = GeneratorSnapshot() if self.unasked is not None and not in_function_transform() else None
        result = func(*args, **kwargs)
        if draw is not None and draw.has_drawn:
            if not draw.is_alike(self.unasked, self.device):
                raise self.error("random", None, f"{name_of(func)} draws other random numbers on every rank", _SEED)
            self.unasked = None
        return result

    def _run(self, value: TrackedValue, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the function with this rank's parts."""
        draw = GeneratorSnapshot() if self.checks_random and not in_function_transform() else None
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, ValueError) as err:
            if isinstance(err, torch.OutOfMemoryError) or not self.checks_values:
                raise
            raise self._mixed(value, f"{name_of(func)} fails, {str(err).splitlines()[0]}") from err
        if draw is not None and draw.has_drawn and draw.is_alike(value.group, value.layout.device):
            raise self.error("random", value.owner, f"{name_of(func)} draws the same random numbers on every rank", _FORK)
        return result

    def _mixed(self, value: TrackedValue, why: str, remedy: str = _GATHER) -> BuildError:
        return self.error("values", value.owner, why, remedy)

    def _given(self, name: str, args: Any, kwargs: Any) -> _Given:
        """The arguments as they are before the function changes any."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        changes = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        numbers = {}
        for place, leaf in enumerate(leaves):
            if type(leaf) is slice:
                leaves[place] = Slice(leaf.start, leaf.stop, leaf.step)
            elif isinstance(leaf, torch.Tensor):
                known = self.known.get(leaf)
                if isinstance(known, TrackedValue):
                    leaves[place] = known.layout
                else:
                    numbers[place] = leaf.detach().clone().requires_grad_(leaf.requires_grad) if changes else leaf
                    leaves[place] = untracked(leaf) if leaf.layout is torch.strided else leaf
        return _Given(tuple(leaves), tuple(map(type, leaves)), spec, numbers)

    def _note(self, result: Any, outcomes: Sequence[Outcome], of: TrackedValue) -> None:
        for tensor, outcome in zip(tensors_in(result), outcomes, strict=False):
            if outcome == SAME:
                self.known.pop(tensor, None)
            elif isinstance(outcome, int):
                self.known[tensor] = replace(of, layout=sharded(tensor, outcome, of.layout.ranks))
            elif isinstance(outcome, Layout):
                self.known[tensor] = replace(of, layout=outcome)

    def _take_apart(self, name: str, args: Any, result: Any, fused: TrackedValue) -> bool:
        """Follow what is taken out of a fused output, a block; return whether it is known what the function does to one."""
        blocks, tensors = fused.layout.blocks, list(tensors_in(result))
        if blocks and name in GIVEN_SIZES:
            _check_rows(name, args[0], tensors[0], blocks)
        if not blocks or name not in _SPLITS | {"__getitem__"}:
            return bool(blocks) and name in GIVEN_SIZES | PICKS
        dim = fused.layout.dim
        starts = [sum(blocks[:index]) for index in range(len(blocks) + 1)]
        bounds = index_bounds(args[1], args[0]) if name == "__getitem__" else None
        sizes = tuple(tensor.shape[dim] for tensor in tensors if tensor.dim() > dim)
        if name in _SPLITS and set(sizes) != {starts[-1]}:
            if sizes != blocks:
                raise MixesShards(f"{name} takes {list(sizes)} out of blocks of {list(blocks)}")
            self._follow_parts(tensors, fused)
        elif bounds is not None and dim == args[0].dim() - 1:
            if not set(bounds) <= set(starts):
                raise MixesShards(f"{list(bounds)} is cut out of blocks of {list(blocks)}")
            if bounds in zip(starts, starts[1:], strict=False):
                self._follow_parts(tensors, fused)
        return True

    def _follow_parts(self, tensors: list[torch.Tensor], of: TrackedValue) -> None:
        for tensor in tensors:
            self.known[tensor] = replace(of, layout=sharded(tensor, of.layout.dim, of.layout.ranks))


class _Given(NamedTuple):
    """Arguments one by one as a question has them, and place to tensor of those that are not followed."""

    leaves: tuple[Any, ...]
    kinds: tuple[type, ...]
    spec: Any
    numbers: dict[int, torch.Tensor]


def _check_rows(name: str, fused: torch.Tensor, made: torch.Tensor, blocks: tuple[int, ...]) -> None:
    """A view of a fused output must not put numbers of two blocks into one row.

    Raises:
        Mixed: it does.
    """
    lead = fused.dim() - 1
    if (
        made.dim() <= fused.dim()
        or made.shape[lead] == 1
        or made.shape[:lead] != fused.shape[:lead]
        or fused.shape[-1] != sum(blocks)
    ):
        return
    row = made.shape[lead + 1 :].numel()
    if row and any(end % row for end in accumulate(blocks)):
        raise MixesShards(
            f"{name} makes rows of {row} out of blocks of {list(blocks)}",
            "give the blocks that the code takes apart, or blocks=1 where it takes them apart by heads",
        )


def _blocks(applied: AppliedCut) -> tuple[int, ...]:
    return applied.spec.blocks if len(applied.spec.blocks) > 1 and not applied.cut.parts else ()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_called_by_sharding() -> bool:
    """Return whether this package calls the torch function: its collectives and the like know what they do."""
    names = (str(frame.f_globals.get("__name__")) for frame, _ in walk_stack(sys._getframe(1)))
    watching = ("checks.first_run_check", "checks.partial_gradients", "communication._torch_autograd")
    passed = (__name__, *(f"slapo_sharding.{name}" for name in watching))
    return next(name for name in names if name not in passed and not name.startswith("torch.")).startswith("slapo_sharding.")


def is_called_by_hook() -> bool:
    """Return whether a hook calls, as those do that engines put on modules, and not the module's forward."""
    called = None
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_globals.get("__name__") == nn.Module.__module__ and "self" in frame.f_locals:
            module = frame.f_locals["self"]
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            return any(getattr(hook, "__code__", None) is called for hook in hooks)
        called = frame.f_code
    return False
