"""Runs of the user's parameter hooks, once per step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slapo_core import BuildError, Program, ShardSpec, gather_objects, is_sharded, mesh_groups, parameter_facts, shard_spec

from ..distributed.full_tensors import over_group
from ..distributed.ranks import synchronized_rng
from .hook_kinds import is_elementwise, reads_weights
from .sharded_hooks import (
    TABLES,
    TENSOR_HOOKS,
    Hook,
    HookRef,
    Origin,
    Place,
    ShardedHook,
    Table,
    is_user_hook,
    put_table,
    table_of,
    whole_parameter,
)


class GradientAccess:
    """Reads and writes the reduced gradients of this rank's parameters, here ``Parameter.grad``.

    Attributes:
        keeps_weights: Place where the engine keeps weights, so that hooks cannot change them; empty for ``Parameter.data``.
        counts_unused: True if the engine has zero gradients for parameters that a step does not use.
        steps_all: True if the engine steps parameters without a gradient, with zeros.
    """

    keeps_weights = ""
    counts_unused = False
    steps_all = False

    def begin(self, hooked: Sequence[nn.Parameter]) -> None:
        """Prepare reads of these parameters' gradients. Collective if the engine shards gradients."""

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the gradient, or None. Collective if the engine shards gradients."""
        return parameter.grad

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Set the gradient."""
        own = parameter.grad
        if own is None or gradient is None or own.layout is not torch.strided or gradient.layout is not torch.strided:
            parameter.grad = gradient
        elif own is not gradient:
            own.copy_(gradient)

    def values(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[object]:
        """Return a context in which parameters have their values. Collective if the engine shards them."""
        return nullcontext()


@dataclass
class _HookedParameter:
    """A parameter with hooks, on this rank or on other ranks that have it.

    Args:
        origin: Returns the parameter of the unmodified model.
        reads: True if a hook of some rank may need the whole weights.
        is_local: True if the hooks need only each rank's shard.
        differs: True if ranks have different numbers of hooks.
    """

    name: str
    names: tuple[str, ...]
    origin: Origin
    hooks: list[HookRef] = field(default_factory=list)
    post_hooks: list[HookRef] = field(default_factory=list)
    reads: bool = False
    is_local: bool = False
    differs: bool = False
    parameter: nn.Parameter | None = None
    places: list[Place] = field(default_factory=list)

    def facts(self) -> tuple[int, bool, bool]:
        """Return facts for other ranks: number of hooks, whether one reads weights, and whether one is not elementwise."""
        hooks = [ref.hook for ref in (*self.hooks, *self.post_hooks)]
        reads = bool(self.post_hooks) or any(map(reads_weights, hooks))
        return len(hooks), reads, not all(map(is_elementwise, hooks))


class StepHooks:
    """Takes the user's hooks off this rank's parameters, and runs them once in each step.

    A hook gets the whole gradient of the whole batch, as in one process: reduced over micro-batches, replicas and ties,
    gathered from all shards, and not yet clipped. Its result is scattered to the shards. Hooks that were registered on a shard,
    or after this, stay with torch, and so do hooks of the schedule.

    Args:
        module: This rank's stages, before the engine shards them further.
        is_on: False to leave all hooks to torch.
    """

    def __init__(self, program: Program, module: nn.Module, is_on: bool) -> None:
        self._program = program
        self._taken: list[tuple[nn.Parameter, str, Table]] = []
        self._hooked: dict[str, _HookedParameter] = {}
        self._order: list[_HookedParameter] = []
        self._access = GradientAccess()
        self._handles: list[RemovableHandle] = []
        self._used = set[str]()
        self.is_active = False
        for name, parameter in module.named_parameters() if is_on else ():
            self._hooked[name] = _HookedParameter(name, parameter_facts(parameter).names or (name,), weakref.ref(parameter))
            for table in TABLES:
                self._take(self._hooked[name], parameter, table)

    def _take(self, hooked: _HookedParameter, parameter: nn.Parameter, name: str) -> None:
        table = table_of(parameter, name)
        found = hooked.hooks if name == TENSOR_HOOKS else hooked.post_hooks
        left: Table = {}
        for key, hook in table.items():
            if isinstance(hook, ShardedHook):
                found.append(hook.ref)
                hooked.origin = hook.origin
            elif is_user_hook(hook) and not is_sharded(parameter):
                found.append(HookRef(table, key))
            else:
                left[key] = hook
        if len(left) < len(table):
            self._taken.append((parameter, name, table))
            put_table(parameter, name, left)

    def give_back(self) -> None:
        """Return the hooks to the parameters; they run no longer here."""
        for parameter, name, table in self._taken:
            table.update({key: hook for key, hook in table_of(parameter, name).items() if key not in table})
            put_table(parameter, name, table)
        for handle in self._handles:
            handle.remove()
        self._taken.clear()
        self._hooked.clear()
        self._order, self.is_active, self._access = [], False, GradientAccess()

    def bind(self, module: nn.Module, access: GradientAccess) -> None:
        """Find the parameters of this rank's stages, and exchange facts of hooks with all ranks. Collective over the mesh."""
        own = {name: each.facts() for name, each in self._hooked.items() if each.hooks or each.post_hooks}
        everyone = gather_objects((own, self._place), self._program.mesh)
        alike = [found for found, place in everyone if place == self._place]
        self.is_active = any(found for found, _ in everyone)
        named, places = dict(module.named_parameters()), _places(self._program.module)
        for name, each in list(self._hooked.items()):
            known = [found.get(name, (0, False, False)) for found in alike]
            if not any(number for number, _, _ in known):
                del self._hooked[name]
                continue
            each.reads = any(reads for _, reads, _ in known)
            each.is_local = not any(is_whole for _, _, is_whole in known)
            each.differs = len({number for number, _, _ in known}) > 1
            each.parameter = named[name]
            each.places = places.get(id(each.parameter), [])
        self._order = self._in_backward_order()
        self._access = access
        if access.counts_unused:
            self._record_use()

    @property
    def _place(self) -> int:
        return self._program.axis_rank("pp")

    def _in_backward_order(self) -> list[_HookedParameter]:
        """Return the parameters in backward order; tied ones of several stages first, so that their stages meet at them."""
        named = dict(self._program.module.named_parameters(remove_duplicate=False))
        tied = {id(named[tie.names[0]]) for tie in self._program.ties}
        shared = sorted((each for each in self._hooked.values() if id(each.parameter) in tied), key=lambda each: each.names)
        return [*shared, *(each for each in reversed(self._hooked.values()) if id(each.parameter) not in tied)]

    def _record_use(self) -> None:
        for each in self._order:
            parameter, names = each.parameter, each.names

            def note(gradient: torch.Tensor, names: tuple[str, ...] = names) -> None:
                self._used.update(names)

            if parameter is not None and parameter.requires_grad:
                self._handles.append(parameter.register_hook(note))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def run(self) -> None:
        """Run all hooks. Collective over the mesh if some rank has hooks, also after an error in a hook.

        Raises:
            Exception: the first error of a hook of this rank.
            BuildError: a hook changed something that the engine cannot use.
        """
        if not self.is_active:
            return
        used: set[str] | None = None
        if self._access.counts_unused:
            used = set[str]().union(*gather_objects(self._used, self._program.mesh))
            self._used.clear()
        failure: Exception | None = None
        self._access.begin([each.parameter for each in self._order if each.parameter is not None])
        mesh = self._program.mesh
        with synchronized_rng(mesh_groups(mesh), mesh.device_type if mesh is not None else "cpu"):
            for each in self._order:
                if used is None or not used.isdisjoint(each.names):
                    failure = self._run_hooks_of(each, is_silent=failure is not None) or failure
        if failure is not None:
            raise failure

    def _run_hooks_of(self, each: _HookedParameter, is_silent: bool) -> Exception | None:
        """Run the hooks of one parameter; after an earlier error, only send the messages that other ranks wait for."""
        parameter = each.parameter
        assert parameter is not None
        spec = shard_spec(parameter) if is_sharded(parameter) and not each.is_local else None
        gradient = self._gradient(parameter, spec)
        if gradient is None:
            return None
        try:
            with ExitStack() as stack:
                whole = parameter
                if each.reads:
                    stack.enter_context(self._access.values([parameter]))
                if each.reads and spec is not None:
                    given = parameter, spec, each.origin, each.places
                    whole = stack.enter_context(whole_parameter(*given, in_place=True))
                result = gradient if is_silent else self._apply_hooks(each, gradient, whole)
            if not is_silent:
                self._access.put(parameter, spec.local(result) if spec is not None and result is not None else result)
        except Exception as err:
            return err
        return None

    def _gradient(self, parameter: nn.Parameter, spec: ShardSpec | None) -> torch.Tensor | None:
        """Return a copy of the gradient, which hooks may keep."""
        if spec is None:
            own = self._access.get(parameter)
            return None if own is None else own.clone()
        return over_group(parameter, lambda tensor: self._access.get(tensor))  # type: ignore[arg-type]

    def _apply_hooks(self, each: _HookedParameter, gradient: torch.Tensor, whole: nn.Parameter) -> torch.Tensor | None:
        before = gradient.clone() if each.differs else gradient
        kept = whole.detach().clone() if self._access.keeps_weights and each.post_hooks else None
        own, whole.grad = whole.grad, None  # hooks run before accumulation, as in a backward
        try:
            found = _after_accumulation(each, _after_hooks(each, gradient), whole)
        finally:
            whole.grad = own
        self._check(each, found, whole, kept)
        if each.differs and (found is None or not torch.equal(before, found)):
            raise BuildError(
                f"{each.names[0]!r} has a hook on some ranks only, and it changes the gradient; register it on all ranks"
            )
        return found

    def _check(
        self, each: _HookedParameter, gradient: torch.Tensor | None, whole: nn.Parameter, kept: torch.Tensor | None
    ) -> None:
        """Refuse changes that the engine would ignore."""
        if kept is not None and not torch.equal(kept, whole.detach()):
            whole.copy_(kept)
            raise BuildError(
                f"a hook of {each.names[0]!r} changes the weights, which {self._access.keeps_weights}; let it change the "
                "gradient, or use target='torch'"
            )
        if gradient is None and self._access.steps_all:
            raise BuildError(
                f"a hook of {each.names[0]!r} takes the gradient away, and this engine would step with zeros; let it change "
                "the gradient, or use target='torch'"
            )


def _after_hooks(each: _HookedParameter, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient after the hooks of ``register_hook``."""
    for hook in _live_hooks(each.hooks):
        result = hook(gradient)
        if result is None:
            continue
        if not isinstance(result, torch.Tensor) or result.shape != gradient.shape:
            what = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else f"type {type(result).__name__}"
            raise BuildError(
                f"a hook of {each.names[0]!r} returns a gradient of {what}, where it got one of shape {tuple(gradient.shape)}; "
                "return a tensor of that shape, or None"
            )
        gradient = result
    return gradient


def _after_accumulation(each: _HookedParameter, gradient: torch.Tensor, whole: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient after the post-accumulate hooks, which read it from the parameter."""
    if not each.post_hooks:
        return gradient
    kind, whole.grad_dtype = whole.grad_dtype, gradient.dtype
    whole.grad = gradient
    try:
        for hook in _live_hooks(each.post_hooks):
            if hook(whole) is not None:
                raise BuildError(f"a hook of {each.names[0]!r} that waits for the accumulated gradient has to return None")
        return whole.grad
    finally:
        whole.grad = None
        whole.grad_dtype = kind


def _live_hooks(refs: Iterable[HookRef]) -> Iterator[Hook]:
    return (hook for ref in refs if (hook := ref.hook) is not None)


def _places(module: nn.Module) -> dict[int, list[Place]]:
    found: dict[int, list[Place]] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((each, name))
    return found
