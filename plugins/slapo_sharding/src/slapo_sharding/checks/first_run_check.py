"""Check of the first run: code outside a sharded module must not take a shard for the whole value.

``install_first_run_check`` is called when a schedule is built. The first forward of the model, or of any module that contains
a part of it (an engine, a stage, a wrapper), then runs under a mode that sees every torch function. So does the first forward
with gradients, and the first in training, if these come later. Nothing is left in the way of a call after these runs; a model
that only infers is awaited as long as it lives. A recomputation in a backward repeats code that was checked in the forward.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from traceback import walk_stack
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from slapo_core import BuildError, is_sharded, parameter_facts
from slapo_tracing.nodes import SHAPES, is_metadata, is_taken_apart, name_of

from ..communication._torch_autograd import no_functions, watched_functions
from ..rules.sharding_rule import holds_tensor, is_kept_for_inside, returns_shard, split_of
from ..splitting import weight_digests
from ..syncs.sync_hooks import REDUCING, map_output, off_switch, syncs_of
from . import size_errors
from .local_numel import NUMEL_METHODS, LocalNumel, is_called_by_slapo
from .module_comparison import ModuleComparison
from .module_rerun import Rerun
from .partial_gradients import PartialGradients
from .reentrant_checkpoints import run_as_non_reentrant
from .value_tracking.sharded_values import ShardedValues, is_called_by_hook, is_called_by_sharding
from .value_tracking.tracked_value import makes_new, tensors_in

_HARMLESS = frozenset(("untyped_storage", "data_ptr"))
_REQUIRES_GRAD = frozenset(("requires_grad_", "requires_grad"))
_CASTS = frozenset(("to", "type_as"))
_TORCH = os.path.dirname(torch.__file__) + os.sep
_MODES = ((True, True), (True, False), (False, True), (False, False))


class _PendingRuns:
    """Sharded modules of one build, and the modes (gradients, training) in which the model has yet to run.

    A part of the model that is called alone is checked, and the whole model is checked again.
    """

    def __init__(self, root: nn.Module, owners: Iterable[nn.Module], disabled: frozenset[str]) -> None:
        self.root, self.owners, self.disabled = ref(root), WeakSet(owners), disabled
        self.inside = WeakSet(module for module in root.modules() if module is not root)
        self.unchecked = set(_MODES)
        self.alone: dict[tuple[bool, bool], WeakSet[nn.Module]] = {mode: WeakSet() for mode in _MODES}

    def is_due(self, module: nn.Module) -> bool:
        mode = _mode(module)
        if mode not in self.unchecked or module in self.alone[mode]:
            return False
        return any(inside in self.owners for inside in module.modules())

    def is_first(self, module: nn.Module) -> bool:
        return len(self.unchecked) == len(_MODES) and module not in self.inside

    def mark_checked(self, module: nn.Module) -> None:
        """Record a run; a run with gradients, or in training, also covers the mode without."""
        is_graded, is_training = _mode(module)
        covered = {mode for mode in self.unchecked if mode[0] <= is_graded and mode[1] <= is_training}
        if module not in self.inside:
            self.unchecked -= covered
        for mode in covered if module in self.inside else ():
            self.alone[mode].update(module.modules())


def _mode(module: nn.Module) -> tuple[bool, bool]:
    """Return whether gradients are recorded, and whether the module is in training."""
    return torch.is_grad_enabled(), module.training


_waiting: list[_PendingRuns] = []
_running_mode: ContextVar[_FirstRunMode | Rerun | None] = ContextVar("reads", default=None)
_plain_call: Callable[..., Any] = nn.Module.__call__


def install_first_run_check(root: nn.Module, owners: Iterable[nn.Module], disabled: frozenset[str] = frozenset()) -> None:
    """Check the first run of the model that has these sharded modules.

    The run raises ``BuildError`` if code outside these modules reads more of their sharded tensors than metadata, or needs the
    whole of a sharded value (see ``sharded_values``). All ranks run the same code, so all of them raise it.
    """
    build = _PendingRuns(root, owners, disabled)
    if not build.owners:
        return
    global _plain_call
    if nn.Module.__call__ is not _call:
        _plain_call = nn.Module.__call__
        nn.Module.__call__ = _call  # type: ignore[method-assign]
    _waiting.append(build)


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or nn.Module.__call__ is not _call:  # a trace is not a run
        return _plain_call(module, *args, **kwargs)
    reads = _running_mode.get()
    if reads is not None:
        return reads.run_inner_module(module, args, kwargs)
    builds = [build for build in _waiting if build.is_due(module)]
    if not builds:
        if not all(build.owners for build in _waiting):
            _end_first_runs()
        return _plain_call(module, *args, **kwargs)
    is_whole = any(module not in build.inside for build in builds)
    disabled = frozenset[str].intersection(*(build.disabled for build in builds))
    if "weights" not in disabled and any(build.is_first(module) for build in builds):
        weight_digests.check_same_weights(module)
    comparison = ModuleComparison([root for build in builds if (root := build.root()) is not None], _rerun_modules, _plain_call)
    reads = _FirstRunMode(module, is_whole, comparison, disabled)
    # importing the compiler if nobody has would cost a second
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with eager, run_as_non_reentrant(), reads, watched_functions(reads.check_autograd_function):
        token = _running_mode.set(reads)
        try:
            result = reads.run_inner_module(module, args, kwargs)
        except size_errors.SIZE_ERRORS as err:
            if "sizes" in disabled or reads.failed is None or reads.failed[0] is not err:
                raise
            raise BuildError(reads.failed[1]) from err
        finally:
            _running_mode.reset(token)
    for build in builds:
        build.mark_checked(module)
    _end_first_runs()
    return result


@contextmanager
def _rerun_modules(rerun: Rerun) -> Iterator[None]:
    """Pass the modules that are called in the block to a rerun, without checks."""
    reads = _running_mode.get()
    assert isinstance(reads, _FirstRunMode)
    token, reads.paused = _running_mode.set(rerun), True
    try:
        yield
    finally:
        _running_mode.reset(token)
        reads.paused = False


def _end_first_runs() -> None:
    _waiting[:] = [build for build in _waiting if build.unchecked and build.owners]
    if not _waiting and nn.Module.__call__ is _call:
        nn.Module.__call__ = _plain_call  # type: ignore[method-assign]


class _FirstRunMode(TorchFunctionMode):
    """Mode of a checked run: it knows the running modules, and refuses wrong uses of sharded tensors and values."""

    def __init__(self, model: nn.Module, is_whole: bool, comparison: ModuleComparison, disabled: frozenset[str]) -> None:
        super().__init__()
        self.comparison, self.paused, self.disabled = comparison, False, disabled
        self.is_whole = is_whole
        """True if the whole model runs, False if a part of it runs alone."""
        self.running: list[nn.Module] = []
        self.values = ShardedValues(self._value_error, *weight_digests.sharding_group(model), disabled)
        self.gradients = PartialGradients(partial(self._error, "gradients"), "gradients" in disabled)
        self.failed: tuple[Exception, str] | None = None
        """A size error and the message that explains it by the innermost module; None if none was explained."""
        self.columns: list[nn.Module] = []
        """Modules that returned sharded outputs, in the order in which they ran."""

    def run_inner_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module; code inside a module whose cut a numeric probe has verified is not checked."""
        if self.running and (applied := split_of(self.running[-1])) is not None and applied.cut.shown:
            return _plain_call(module, *args, **kwargs)
        self.running.append(module)
        handles = [*self.gradients.enter(module), *self.values.track_scattered_input(module), *self._check_reductions(module)]
        try:
            with no_functions():
                self.values.enter(module, args, kwargs)
                call = None if "comparison" in self.disabled else self.comparison.enter(module, args, kwargs)
            result = _plain_call(module, *args, **kwargs)
            with no_functions():
                if returns_shard(module):
                    self.columns.append(module)
                self.values.leave(module, result, last=len(self.running) == 1, is_whole=self.is_whole)
                self.gradients.leave(module, result)
            if call is not None and (wrong := self.comparison.leave(call, result, self.values.known, self.running[:-1])):
                line, reason = wrong
                raise BuildError(f"{self._describe_module(module)} at {line}: {reason}; {off_switch('comparison')}")
            with no_functions():
                if self.is_whole and len(self.running) == 1:
                    result = self.gradients.check_output(result)
        except size_errors.SIZE_ERRORS as err:
            self._record_size_error(module, args, kwargs, err)
            raise
        finally:
            self.running.pop()
            for handle in handles:
                handle.remove()
        return result

    def _check_reductions(self, module: nn.Module) -> list[RemovableHandle]:
        """Check the value that a sync of a module reduces, if the module itself is not sharded."""
        op = next((sync.op for sync in syncs_of(module, "fwd_post")), None)
        if op not in REDUCING or split_of(module) is not None:
            return []

        def check(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            map_output(lambda x: self.gradients.check_sum(op, self.values.reduce(x)), output)

        return [module.register_forward_hook(check, prepend=True)]

    def check_autograd_function(self, function: Any, args: tuple[Any, ...], result: Any) -> None:
        """Check an autograd function of the model's own that was applied to sharded values."""
        if not self.paused and not is_called_by_sharding() and not is_called_by_hook() and split_of(self.running[-1]) is None:
            with no_functions():
                self.values.check_autograd_function(function, args, result)

    def _record_size_error(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], err: Exception) -> None:
        """Record the explanation of a size error; it is raised when the error leaves the model, as code may catch it."""
        if self.failed is None or self.failed[0] is not err:
            inside = {*module.modules()}
            column = next((each for each in reversed(self.columns) if each in inside), None)
            reason = size_errors.explain_size_error(module, args, kwargs, err, None if column is None else self._path(column))
            self.failed = None if reason is None else (err, f"{self._describe_module(module)}: {reason}; {off_switch('sizes')}")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        tensors = [*tensors_in(args), *tensors_in(kwargs)]
        owner = None
        for tensor in tensors[:1] if name_of(func) in _CASTS else tensors:
            if is_sharded(tensor) and not self._is_own(tensor) and not _is_harmless(func):
                owner = self._traced_owner(tensor)
                if owner is None and "shard_reads" not in self.disabled:
                    message = self._message(func, tensor)
                    if name_of(func) not in NUMEL_METHODS:
                        raise BuildError(message)
                    count = func(*args, **kwargs)
                    return count if is_called_by_slapo() else LocalNumel(count, partial(self._refuse, message))
        for number in (*args, *kwargs.values()):
            if isinstance(number, LocalNumel):
                number.refuse()
        if owner is not None:
            return self.values.call_of(owner, func, args, kwargs)
        if split_of(self.running[-1]) is not None:
            return self.values.call(func, args, kwargs, tensors, self.running)
        gradient = self.gradients.call(func, tensors, is_called_by_sharding)
        result = self.values.call(func, args, kwargs, tensors, self.running)
        made = args[0] if result is None and args else result
        is_leaf = isinstance(made, torch.Tensor) and made.requires_grad and made.is_leaf
        if name_of(func) in _REQUIRES_GRAD and is_leaf and not is_sharded(made):
            self.gradients.start(made, is_whole=made not in self.values.known)
        if not (isinstance(gradient, BuildError) and self.values.are_mixed(made)):  # the value was wrong before
            self.gradients.note(made, gradient, tensors)
        return result

    def _is_own(self, tensor: torch.Tensor) -> bool:
        reader = self.running[-1]
        return holds_tensor(reader, tensor) and not is_kept_for_inside(reader, tensor)

    def _traced_owner(self, tensor: torch.Tensor) -> nn.Module | None:
        """Return the module that holds a tensor, if the running graph has inlined it and uses the tensor nowhere else."""
        graphs = [module for module in reversed(self.running) if isinstance(module, fx.GraphModule)]
        inside: list[tuple[fx.Graph, str, nn.Module]] = [(g.graph, *named) for g in graphs for named in g.named_modules()]
        holding = (each for each in inside if is_taken_apart(each[2]) and holds_tensor(each[2], tensor))
        return next((module for graph, path, module in holding if _is_used_by_module_only(graph, path)), None)

    def _refuse(self, message: str) -> None:
        """Refuse to compute with the number of elements of a shard, while this run lasts."""
        if _running_mode.get() is self:
            raise BuildError(message)

    def _path(self, module: nn.Module) -> str:
        path = next((path for path, other in self.running[0].named_modules() if other is module), "")
        return re.sub(r"^(module(\.|$))+", "", path)  # engines and wrappers of torch keep the model in an attribute ``module``

    def _describe_module(self, module: nn.Module) -> str:
        path = self._path(module)
        return f"{type(module).__name__} {path!r}" if path else f"the model, {type(module).__name__},"

    def _value_error(self, check: str, owner: nn.Module | None, why: str, remedy: str) -> BuildError:
        what = "all have the same value" if owner is None else f"each rank has a part of the output of {self._path(owner)!r}"
        return self._error(check, f"{why}, and {what}; {remedy}")

    def _error(self, check: str, why: str) -> BuildError:
        """Make the error of a check for the code that runs now."""
        return BuildError(f"{self._describe_module(self.running[-1])} at {_model_line()}: {why}; {off_switch(check)}")

    def _message(self, func: Any, tensor: torch.Tensor) -> str:
        reader = self.running[-1]
        name = " = ".join(parameter_facts(tensor).names) or f"a parameter of shape {tuple(tensor.shape)}"
        return (
            f"{self._describe_module(reader)} uses {name!r} in {name_of(func)} at {_model_line()}, but this rank "
            "has only its part of it, which its own module alone can use; call that module instead, or leave the parameter "
            f"whole; {off_switch('shard_reads')}"
        )


def _is_used_by_module_only(graph: fx.Graph, path: str) -> bool:
    """Return whether a graph uses the tensors of a module only in the module's forward, or in rewrites of the forward."""
    held = (node for node in graph.find_nodes(op="get_attr") if str(node.target).rpartition(".")[0] == path)
    return all(user.meta.get("is_rewrite") or user.meta.get("module") == path for node in held for user in node.users)


def _is_harmless(func: Any) -> bool:
    """Return whether a function gives the same for a shard as for the whole tensor, or reads no values."""
    name = name_of(func)
    if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
        return True  # ZeRO replaces the data when it gathers a parameter
    return name in _HARMLESS | _REQUIRES_GRAD or makes_new(name) or (is_metadata(func, name) and name not in SHAPES)


def _model_line() -> str:
    """Return the running line of the model's own code, without the frames of Slapo and torch."""
    frames = ((frame, f"{frame.f_code.co_filename}:{line}") for frame, line in walk_stack(sys._getframe(1)))
    theirs = (line for frame, line in frames if not str(frame.f_globals.get("__name__")).startswith("slapo_"))
    return next((line for line in theirs if not line.startswith((_TORCH, "<"))), "an unknown line")
