"""The user's hooks of parameters, run once in a step."""

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
from ..distributed.synchronized_rng import synchronized_rng
from .closure_references import reads_weights
from .elementwise_marker import is_elementwise
from .hook_tables import TABLES, TENSOR_HOOKS, Hook, HookRef, Table, is_user_hook, put_table, table_of
from .sharded_hooks import ShardedHook
from .whole_parameter import Origin, Place, whole_parameter


class GradientAccess:
    """Reads and writes the reduced gradients of this rank's parameters: those that torch keeps at the parameters.

    Attributes:
        keeps_weights: Where else an engine keeps the weights, so that a hook cannot change them; empty where it does not.
        counts_unused: Whether the engine takes zeros for the gradient of a parameter that a step does not use.
        steps_all: Whether the engine steps a parameter whose gradient a hook took away, with zeros.
    """

    keeps_weights = ""
    counts_unused = False
    steps_all = False

    def begin(self, hooked: Sequence[nn.Parameter]) -> None:
        """Get ready for reading the gradients of these. Collective where an engine shares gradients out."""

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the gradient; None where there is none. Collective where an engine shares gradients out."""
        return parameter.grad

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Let this be the gradient."""
        own = parameter.grad
        if own is None or gradient is None or own.layout is not torch.strided or gradient.layout is not torch.strided:
            parameter.grad = gradient
        elif own is not gradient:
            own.copy_(gradient)

    def values(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[object]:
        """Let parameters have their values inside. Collective where an engine shares them out."""
        return nullcontext()


@dataclass
class _HookedParameter:
    """A parameter with hooks, on this rank or on others that have it too.

    Args:
        name: In this rank's stages.
        names: In the unmodified model.
        origin: The parameter that it was there.
        hooks: Hooks of ``register_hook``.
        post_hooks: Hooks of ``register_post_accumulate_grad_hook``.
        reads: Whether a hook of some rank may need the whole weights.
        is_local: Whether the part of each rank is enough.
        differs: Whether other ranks have more or fewer hooks.
        parameter: The parameter that the model has now.
        places: Where in the model.
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
        """Return facts that ranks compare: the number of hooks, whether one reads weights, and whether one needs the whole."""
        hooks = [ref.hook for ref in (*self.hooks, *self.post_hooks)]
        reads = bool(self.post_hooks) or any(map(reads_weights, hooks))
        return len(hooks), reads, not all(map(is_elementwise, hooks))


class StepHooks:
    """Takes the user's hooks off this rank's parameters, and runs them once in each step.

    A hook sees the whole gradient of the whole batch, as in one process: reduced over micro-batches, replicas and ties, put
    together from the parts of all ranks, and not yet clipped. What it makes of it goes back to the parts. Hooks that were put
    on a part, or on any parameter after this, are torch's, and so are those of the schedule.

    Args:
        program: The program that is built.
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
        """Put the hooks back on the parameters, and run them no more."""
        for parameter, name, table in self._taken:
            table.update({key: hook for key, hook in table_of(parameter, name).items() if key not in table})
            put_table(parameter, name, table)
        for handle in self._handles:
            handle.remove()
        self._taken.clear()
        self._hooked.clear()
        self._order, self.is_active, self._access = [], False, GradientAccess()

    def bind(self, module: nn.Module, access: GradientAccess) -> None:
        """Find the parameters as the engine has them, and agree with the other ranks on what is sent. Collective over the mesh.

        Args:
            module: This rank's stages.
            access: The engine's gradients.
        """
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
        self._order = self._sorted()
        self._access = access
        if access.counts_unused:
            self._note_use()

    @property
    def _place(self) -> int:
        return self._program.axis_rank("pp")

    def _sorted(self) -> list[_HookedParameter]:
        """In the order of a backward; those of several stages before the others, so that each stage is at the same number."""
        named = dict(self._program.module.named_parameters(remove_duplicate=False))
        tied = {id(named[tie.names[0]]) for tie in self._program.ties}
        shared = sorted((each for each in self._hooked.values() if id(each.parameter) in tied), key=lambda each: each.names)
        return [*shared, *(each for each in reversed(self._hooked.values()) if id(each.parameter) not in tied)]

    def _note_use(self) -> None:
        for each in self._order:
            parameter, names = each.parameter, each.names

            def note(gradient: torch.Tensor, names: tuple[str, ...] = names) -> None:
                self._used.update(names)

            if parameter is not None and parameter.requires_grad:
                self._handles.append(parameter.register_hook(note))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def run(self) -> None:
        """Run all hooks. Collective over the mesh, where some rank has hooks, and also after an error in one.

        Raises:
            Exception: the first one that a hook of this rank raised.
            BuildError: a hook did what the engine cannot do.
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
                    failure = self._run_one(each, is_silent=failure is not None) or failure
        if failure is not None:
            raise failure

    def _run_one(self, each: _HookedParameter, is_silent: bool) -> Exception | None:
        """Run the hooks of one parameter; after an error of another this rank still sends what the others wait for."""
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
                result = gradient if is_silent else self._applied(each, gradient, whole)
            if not is_silent:
                self._access.put(parameter, spec.local(result) if spec is not None and result is not None else result)
        except Exception as err:
            return err
        return None

    def _gradient(self, parameter: nn.Parameter, spec: ShardSpec | None) -> torch.Tensor | None:
        """Return a gradient that hooks may keep."""
        if spec is None:
            own = self._access.get(parameter)
            return None if own is None else own.clone()
        return over_group(parameter, lambda tensor: self._access.get(tensor))  # type: ignore[arg-type]

    def _applied(self, each: _HookedParameter, gradient: torch.Tensor, whole: nn.Parameter) -> torch.Tensor | None:
        before = gradient.clone() if each.differs else gradient
        kept = whole.detach().clone() if self._access.keeps_weights and each.post_hooks else None
        own, whole.grad = whole.grad, None  # as in a backward, before the gradient is accumulated
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
        """Refuse what an engine would not see."""
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
    """Return what the hooks of ``register_hook`` make of a gradient."""
    for hook in _present(each.hooks):
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
    """Return what the hooks that wait for an accumulated gradient make of it, which they find at the parameter."""
    if not each.post_hooks:
        return gradient
    kind, whole.grad_dtype = whole.grad_dtype, gradient.dtype
    whole.grad = gradient
    try:
        for hook in _present(each.post_hooks):
            if hook(whole) is not None:
                raise BuildError(f"a hook of {each.names[0]!r} that waits for the accumulated gradient has to return None")
        return whole.grad
    finally:
        whole.grad = None
        whole.grad_dtype = kind


def _present(refs: Iterable[HookRef]) -> Iterator[Hook]:
    return (hook for ref in refs if (hook := ref.hook) is not None)


def _places(module: nn.Module) -> dict[int, list[Place]]:
    found: dict[int, list[Place]] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((each, name))
    return found
