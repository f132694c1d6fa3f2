"""Check of the first run: code between layers must not need other ranks' shards of a value.

The outputs of modules that are split along their output, and of syncs that scatter, are tracked through the torch functions
that the model calls, by DTensor's rules, as in a dry run. A softmax or a sum along the sharded dimension, a fused output that
is split at other places than its blocks, or a layer with the wrong shards as input would give wrong results. Torch's rules
also refuse some functions that ranks can compute on shards: a numeric probe decides then, as it does for partial values
(``numeric_probe``). A wrong value is an error if it enters a sharded layer, is reduced over the ranks, or leaves the model;
code may look at it. Results of functions without a rule, and of collectives, are not tracked further.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from traceback import walk_stack
from typing import Any

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
from ...planning.dry_run.function_probe import check_on_random_shards
from ...planning.dry_run.split_specs import index_bounds
from ...rules.sharding_rule import AppliedCut, split_of
from ...splitting.attention_heads import counts_locally
from ...syncs.sync_hooks import REDUCING, Sync, first_input, map_first_input, map_output, syncs_of
from .numeric_probe import REDUCE, MixesShards
from .op_rules import PICKS, result_layouts
from .rng_agreement import GeneratorSnapshot
from .tracked_value import (
    GIVEN_SIZES,
    SAME,
    Layout,
    OpCall,
    Outcome,
    Slice,
    TrackedValue,
    partial_value,
    sharded_layout,
    tensors_in,
    untracked_layout,
)

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
    """Sharded and partial values of a running forward.

    Args:
        error: Makes the error for the code that runs now, from the name of the check, the layer whose output is wrongly used, a
            reason and a remedy.
        group: Group that the model is sharded over; None if it is not.
        device: Device of the shards.
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
        self.uncompared_group = group if self.checks_random else None
        """Group whose random states for replicated values have yet to be compared; None once they were."""
        self.known: Any = WeakIdKeyDictionary()
        """Tensor to its ``TrackedValue``, to an error if its value is wrong, or to None if unknown; others are replicated."""

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the input of a called module; raise ``BuildError`` if the module is sharded and needs another layout."""
        applied, x = split_of(module), first_input(args, kwargs)
        value = self.known.get(x) if x is not None else None
        if not self.checks_values or applied is None or x is None or value is None or any(syncs_of(module, "fwd_pre")):
            return
        if isinstance(value, BuildError):
            raise value
        if value.is_partial:
            raise self._value_error(value, f"a {type(module).__name__} that is sharded receives a partial value", REDUCE)
        kind, blocks = type(module).__name__, tuple(block * applied.spec.num_shards for block in value.layout.blocks)
        if applied.cut.input != "sharded":
            raise self._value_error(value, f"a {kind} that is split along its output receives a shard of its input")
        if type(value.layout.placement) is not Shard:
            raise self._value_error(value, f"a {kind} that is sharded receives parts in another order")
        expected = applied.cut.dim % x.dim(), _blocks(applied)
        if (found := (value.layout.dim, blocks)) != expected:
            given, wanted = (f"{list(sizes) or 'one block'} along {dim}" for dim, sizes in (found, expected))
            raise self._value_error(value, f"a {kind} that is split in {wanted} is given {given}")

    def track_scattered_input(self, module: nn.Module) -> list[RemovableHandle]:
        """Track the shard that a sync makes of the module's input, by a hook to be removed when the module has returned."""
        syncs = list(syncs_of(module, "fwd_pre"))
        if not syncs or syncs[-1].op not in _CUTTING:
            return []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            map_first_input(partial(self._track_scattered, module, syncs[-1]), args, kwargs)

        return [module.register_forward_pre_hook(note, with_kwargs=True)]

    def leave(self, module: nn.Module, output: Any, last: bool, is_whole: bool) -> None:
        """Track the output of a module that has returned.

        Raises:
            BuildError: the ``last`` module to return returns a wrong value, or the model (``is_whole``) returns a partial one.
        """
        applied, syncs = split_of(module), list(syncs_of(module, "fwd_post"))
        if any(sync.op in _CHANGING for sync in syncs):
            self._set_unknown(output)
        for known in self._known_values(_tensors(output)) if last else ():
            if isinstance(known, BuildError):
                raise known
            if self.checks_values and is_whole and known is not None and known.is_partial:
                raise self._value_error(known, "it returns a partial value that is never reduced", REDUCE)
        if syncs:
            if syncs[-1].op in _CUTTING:
                map_output(partial(self._track_scattered, module, syncs[-1]), output)
        elif applied is not None and applied.cut.output == "partial":
            map_output(partial(self._track_partial, module, applied.spec), output)
        elif applied is not None and applied.returns_shard:
            map_output(partial(self._track_output, module, applied), output)

    def _track_output(self, module: nn.Module, applied: AppliedCut, x: torch.Tensor) -> torch.Tensor:
        self.known[x], ranks = None, applied.spec.num_shards
        if applied.spec.uneven_ranges is None:
            blocks = tuple(block // ranks for block in _blocks(applied))
            layout = sharded_layout(x, applied.cut.dim % x.dim(), ranks, blocks)
            self.known[x] = TrackedValue(layout, module, applied.spec.group)
        return x

    def _track_partial(self, module: nn.Module, spec: ShardSpec, x: torch.Tensor) -> torch.Tensor:
        self.known[x] = TrackedValue(partial_value(x, spec.num_shards), module, spec.group)
        return x

    def _track_scattered(self, module: nn.Module, sync: Sync, x: torch.Tensor) -> torch.Tensor:
        """Track the shard that a sync has made, for example of the sequence."""
        assert sync.axis is not None
        self.known[x] = TrackedValue(sharded_layout(x, sync.axis % x.dim(), num_ranks(sync.group)), module, sync.group)
        return x

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return a value that a sync is about to reduce; raise ``BuildError`` if it is wrong."""
        if isinstance(known := self.known.get(x), BuildError):
            raise known
        return x

    def are_mixed(self, result: Any) -> bool:
        """Return whether any tensor in a result has a wrong value."""
        return any(isinstance(known, BuildError) for known in self._known_values(tensors_in(result)))

    def _known_values(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        found = (self.known.get(tensor, SAME) for tensor in tensors)
        return [known for known in found if known is not SAME]

    def _set_unknown(self, value: Any, known: BuildError | None = None) -> None:
        for tensor in _tensors(value):
            self.known[tensor] = known

    def call(
        self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], running: Sequence[nn.Module]
    ) -> Any:
        """Call a torch function of these tensors and track its results.

        Raises:
            BuildError: the function fails on this rank's shard, or draws the same random numbers on all ranks.
        """
        name = name_of(func)
        values = self._known_values(tensors)
        if split_of(running[-1]) or is_metadata(func, name):
            return func(*args, **kwargs)
        if not values:
            return self._run_replicated(func, args, kwargs)
        mixed = next((value for value in values if isinstance(value, BuildError)), None)
        if mixed or None in values or is_called_by_sharding():
            try:
                result = func(*args, **kwargs)
            except RuntimeError as err:  # a size does not fit because of the earlier fault
                if mixed is not None and not is_called_by_sharding():
                    raise mixed from err
                raise
            self._set_unknown(result, mixed)
            return result
        value = next((value for value in values if value.layout.blocks or value.is_partial), values[0])
        leaves, spec, numbers = self._flatten_arguments(name, args, kwargs)
        around = global_state(value.layout.device)
        run = self._run_replicated if value.is_partial else partial(self._run_sharded, value)
        result = run(func, args, kwargs)
        changed = args[0] if result is None and args else result
        self._set_unknown(result)
        # a graph contains the inlined code of modules with local counts
        inside = running[-1].modules() if isinstance(running[-1], fx.GraphModule) else ()
        counted = any(map(counts_locally, (*running, *inside)))
        reduced = any(sync.op in _SUMMING for module in running for sync in syncs_of(module, "fwd_post"))
        try:
            if not self._track_fused_parts(name, args, changed, value):
                shapes = tuple((tensor.shape, tensor.device) for tensor in tensors_in(changed))
                kinds = tuple(map(type, leaves))
                call = OpCall(func, leaves, kinds, spec, value.layout, shapes, reduced, counted, around)
                self._record_layouts(changed, result_layouts(call, numbers), value)
        except MixesShards as err:
            self._set_unknown(changed, self._value_error(value, *err.args) if self.checks_values else None)
        except Exception as err:  # arguments may be anything, and the check must not fail itself
            get_logger().debug("the result of %s is not tracked: %s", name, err)
        return result

    def check_autograd_function(self, function: Any, args: tuple[Any, ...], result: Any) -> None:
        """Check an autograd function that has returned: forward and backward on shards must give shards."""
        given = self._known_values(tensors_in(args))
        values = [each for each in given if isinstance(each, TrackedValue) and not each.is_partial and not each.layout.blocks]
        if not values or len(values) < len(given):
            return
        value, ranks = values[0], values[0].layout.ranks

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            known = self.known.get(leaf)
            known = value if known is None and leaf.shape == value.layout.shape else known
            layout = known.layout if isinstance(known, TrackedValue) else untracked_layout(leaf)
            return layout.empty(fake_mesh(ranks))

        try:
            given_all, made = pytree.tree_map(stand_in, (args, result))
            check_on_random_shards(function.apply, given_all, {}, made, ranks)
        except ValueError:
            name = function.__name__
            why = f"{name} needs all of it, or its backward all of the gradient"
            self._set_unknown(result, self._value_error(value, why) if self.checks_values else None)

    def call_of(self, module: nn.Module, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a torch function of a sharded module whose forward a graph has inlined; check the input as ``enter`` does."""
        value = self.known.get(first_input(args, kwargs))
        if not isinstance(value, TrackedValue) or value.owner is not module:
            self.enter(module, args, kwargs)
        result = func(*args, **kwargs)
        self.leave(module, result, last=False, is_whole=False)
        return result

    def _run_replicated(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the function on replicated values; the first random draw must be equal on all ranks."""
        draw = GeneratorSnapshot() if self.uncompared_group is not None and not in_function_transform() else None
        result = func(*args, **kwargs)
        if draw is not None and draw.advanced_states():
            if not draw.is_same_on_ranks(self.uncompared_group, self.device):
                raise self.error("random", None, f"{name_of(func)} draws different random numbers on each rank", _SEED)
            self.uncompared_group = None
        return result

    def _run_sharded(self, value: TrackedValue, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the function on this rank's shards; random draws must differ between ranks."""
        draw = GeneratorSnapshot() if self.checks_random and not in_function_transform() else None
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, ValueError) as err:
            if isinstance(err, torch.OutOfMemoryError) or not self.checks_values:
                raise
            raise self._value_error(value, f"{name_of(func)} fails, {str(err).splitlines()[0]}") from err
        if draw is not None and draw.advanced_states() and draw.is_same_on_ranks(value.group, value.layout.device):
            raise self.error("random", value.owner, f"{name_of(func)} draws the same random numbers on every rank", _FORK)
        return result

    def _value_error(self, value: TrackedValue, why: str, remedy: str = _GATHER) -> BuildError:
        return self.error("values", value.owner, why, remedy)

    def _flatten_arguments(self, name: str, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], Any, dict[int, torch.Tensor]]:
        """Return leaves and spec of an ``OpCall``, and the untracked tensors by index; the function has changed none yet."""
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
                    leaves[place] = untracked_layout(leaf) if leaf.layout is torch.strided else leaf
        return tuple(leaves), spec, numbers

    def _record_layouts(self, result: Any, outcomes: Sequence[Outcome], of: TrackedValue) -> None:
        for tensor, outcome in zip(tensors_in(result), outcomes, strict=False):
            if outcome == SAME:
                self.known.pop(tensor, None)
            elif isinstance(outcome, int):
                self.known[tensor] = replace(of, layout=sharded_layout(tensor, outcome, of.layout.ranks))
            elif isinstance(outcome, Layout):
                self.known[tensor] = replace(of, layout=outcome)

    def _track_fused_parts(self, name: str, args: Any, result: Any, fused: TrackedValue) -> bool:
        """Track blocks that a function takes out of a fused output; return whether the function's effect is known."""
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
            self._record_layouts(result, [dim] * len(tensors), fused)
        elif bounds is not None and dim == args[0].dim() - 1:
            if not set(bounds) <= set(starts):
                raise MixesShards(f"{list(bounds)} is cut out of blocks of {list(blocks)}")
            if bounds in zip(starts, starts[1:], strict=False):
                self._record_layouts(result, [dim] * len(tensors), fused)
        return True


def _check_rows(name: str, fused: torch.Tensor, made: torch.Tensor, blocks: tuple[int, ...]) -> None:
    """Raise ``MixesShards`` for a view of a fused output that puts elements of two blocks into one row."""
    lead = fused.dim() - 1
    is_split = made.dim() > fused.dim() and made.shape[lead] != 1 and made.shape[:lead] == fused.shape[:lead]
    if not is_split or fused.shape[-1] != sum(blocks):
        return
    row = made.shape[lead + 1 :].numel()
    if row and any(end % row for end in accumulate(blocks)):
        remedy = "give the blocks that the code takes apart, or blocks=1 where it takes them apart by heads"
        raise MixesShards(f"{name} makes rows of {row} out of blocks of {list(blocks)}", remedy)


def _blocks(applied: AppliedCut) -> tuple[int, ...]:
    return applied.spec.blocks if len(applied.spec.blocks) > 1 and not applied.cut.parts else ()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_called_by_sharding() -> bool:
    """Return whether this package, which handles shards correctly, calls the torch function."""
    names = (str(frame.f_globals.get("__name__")) for frame, _ in walk_stack(sys._getframe(1)))
    watching = ("checks.first_run_check", "checks.partial_gradients", "communication._torch_autograd")
    passed = (__name__, *(f"slapo_sharding.{name}" for name in watching))
    return next(name for name in names if name not in passed and not name.startswith("torch.")).startswith("slapo_sharding.")


def is_called_by_hook() -> bool:
    """Return whether a hook of a module, such as an engine's, calls the function, and not a forward."""
    called = None
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_globals.get("__name__") == nn.Module.__module__ and "self" in frame.f_locals:
            module = frame.f_locals["self"]
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            return any(getattr(hook, "__code__", None) is called for hook in hooks)
        called = frame.f_code
    return False
