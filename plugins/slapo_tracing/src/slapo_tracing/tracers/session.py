"""One run of a model's forward that is recorded into graphs, and the request that it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_core import TraceError, get_logger, paths

from ..graphs.guard import Call, Guard, plain_signature
from ..graphs.traced_module import TracedModule, variants_of
from ..nodes import _torch_private as private
from ..nodes.codegen import run_graph
from ..nodes.graph_functions import expect
from ..nodes.nested_values import alias_duplicates, has_tensor, map_tensors, replace_tensors
from ..nodes.opaque_modules import is_opaque
from ..nodes.torch_calls import is_uncertain_query, model_source
from ..recording.attribute_reads import MODULE_ATTRIBUTES, attribute_facts
from ..recording.attribute_writes import (
    RepeatedRun,
    StateChange,
    UsualAttributes,
    assigned_values,
    mark_assigned_tensors,
    state_changes,
)
from ..recording.module_hooks import innermost_forward
from ..recording.recorder import Recorder
from ..recording.sandbox import PythonRandomState, Sandbox
from ..recording.vmapped_functions import CapturedFunction
from .repeated_calls import RepeatedCalls

LeafKind = Literal["leaf", "inline", "graph"]
AssignedValues = Literal["refused", "noted", "returned"]
ByValues = Literal["never", "needed", "first"]
"""Answers to queries for values of the inputs: refused, given if the forward cannot be traced without, or given at once."""

Plan = Callable[[str, nn.Module], LeafKind]
"""Treatment of a called module: it stays whole, is recorded into its caller's graph, or gets a graph of its own."""


@dataclass(frozen=True)
class Request:
    """Request for a trace.

    Args:
        target: Path of the module that gets a graph.
        plan: Treatment of the modules inside.
        symbolic: True to make sizes nodes of the graphs, which then may serve other sizes too.
        by_values: Answers to queries for values of the inputs with those of this call; the graph checks the answers.
            ``"first"`` takes the branches of a run on real tensors, if all answers are yes or no: code that sees fake tensors
            may take others, as Transformers does for attention masks. Otherwise it is as ``"needed"``.
        assigned: Treatment of values that the forward leaves in attributes and does not use itself in the next call:
            ``"refused"``; ``"noted"`` in ``meta["assigned"]`` of their nodes; or ``"returned"``: the result of the only graph
            is a pair of the forward's result and a dict of the assigned values by dotted path.
    """

    target: str
    plan: Plan
    symbolic: bool = False
    by_values: ByValues = "never"
    assigned: AssignedValues = "refused"


_FAILING_MODULE = "failing_module"


@contextmanager
def _note_failing_module(path: str) -> Iterator[None]:
    """Record the path of the innermost failing module on an error of the ``with`` block."""
    try:
        yield
    except Exception as err:
        if getattr(err, _FAILING_MODULE, None) is None:
            with suppress(AttributeError):  # an error class with slots
                setattr(err, _FAILING_MODULE, path)
        raise


@cache
def _warn_of_unrepeated_write(path: str, cls: str, name: str) -> None:
    what = "the forward of %s, a %s, keeps a tensor as its attribute %r, which a graph does not repeat"
    get_logger().warning(f"{what}; nothing that is traced reads it", repr(path or "the whole model"), cls, name)


class _TargetTraced(BaseException):
    """Signal that ends the run once the target is traced; not an ``Exception``, which the model's code might catch."""


class Session(TorchFunctionMode):
    """One run of the root's forward, with a recorder for every module that gets a graph."""

    def __init__(self, root: nn.Module, request: Request, sandbox: Sandbox, earlier: Session | None = None) -> None:
        super().__init__()
        self.root, self.plan, self.sandbox, self.earlier = root, request.plan, sandbox, earlier
        self.request = request
        self.running = self.target = root.get_submodule(request.target)
        self.paths = {id(module): name for name, module in root.named_modules()}
        self.stack: list[Recorder | None] = [None]  # None: the running code is not recorded
        self.whole: dict[int, nn.Module] = {}
        self.read_by: dict[tuple[int, str], set[int]] = {}
        """Attribute (id of the module, name) to the ids of the modules kept whole that read it."""
        self.repeated = RepeatedCalls(sandbox, self.read_by)
        self.graphs: dict[str, tuple[Recorder, Guard]] = {}
        self.settings = UsualAttributes(())
        self.filled: dict[tuple[int, str], Any] = {}
        """Attributes that serve as caches, with their facts after the forward; None for tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.stack[-1]
        return func(*args, **kwargs) if recorder is None else recorder.call_function(func, args, kwargs)

    def module_call(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        recorder = self.stack[-1]
        if recorder is None:
            if module is not self.target or self.graphs:
                return self.run_around(call, module, args, kwargs)
            self.settings = UsualAttributes(each for each in module.modules() if each is not module)
            with private.unrecorded():
                return self.record_target(call, args, kwargs)
        if id(module) not in recorder.modules:
            return call(module, *args, **kwargs)
        path = self.paths[id(module)]
        kind = self.plan(path, module)
        kind = "leaf" if is_opaque(module, inlined=kind == "inline") else kind
        if kind == "leaf" and (found := self.settings.find_unusual(module)) is not None:
            if is_opaque(module):
                raise TraceError(f"the forward sets {found[1]!r} for some calls of {path!r}, which is sharded or has hooks")
            kind = "inline"  # the graph then has the operations for these attributes
        if kind == "leaf":
            self.whole[id(module)] = module
        if kind == "inline":
            with recorder.inline_module(module), _note_failing_module(path):
                return self.run_recorded(recorder, call, module, args, kwargs)
        with private.unrecorded():
            run = self.record if kind == "graph" else self.run_whole
            return recorder.call_module(module, args, kwargs, lambda: run(call, module, args, kwargs))

    def run_around(self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module unrecorded. If its graph may have inlined the target, run its original forward."""
        variants = variants_of(module)
        if self.graphs or variants is None or variants.is_rewritten or self.target not in module.modules():
            return call(module, *args, **kwargs)
        with innermost_forward(module, variants.original(module)):
            return call(module, *args, **kwargs)

    def run_whole(self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module unrecorded. Its draws from Python's and NumPy's random numbers do not count."""
        others, self.running = PythonRandomState(), module
        try:
            with self._pause_recording():
                return self.repeated.run(module, args, kwargs, lambda: call(module, *args, **kwargs))
        finally:
            others.restore()
            self.settings.accept(module)

    @contextmanager
    def _pause_recording(self) -> Iterator[None]:
        self.stack.append(None)
        try:
            yield
        finally:
            self.stack.pop()

    def record_target(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the target and record its own forward, inside of its hooks and wrappers."""
        module = self.target
        if not is_opaque(module):
            out = self.record(call, module, args, kwargs)
        else:
            own: Any = type(module).forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                with private.unrecorded():
                    return self.record(own, module, args, kwargs)

            forward.__signature__ = plain_signature(module)  # type: ignore[attr-defined]
            with private.recorded(), innermost_forward(module, forward):
                out = call(module, *args, **kwargs)
        if module is not self.root:
            raise _TargetTraced
        return out

    def record(self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module and record its first call into a graph of its own."""
        path = self.paths[id(module)]
        if path in self.graphs:
            return self.run_whole(call, module, args, kwargs)
        if self.sandbox.mode.keeps_values and not self.sandbox.answers:
            self.sandbox.mode.keeps_values = False
            args, kwargs = map_tensors((args, kwargs), self.sandbox.fake_of)
        guard = Guard.of(module, args, kwargs)
        args, kwargs = alias_duplicates((args, kwargs), set())
        earlier = self.earlier.graphs.get(path) if self.earlier else None
        with self._pause_recording():
            recorder = Recorder(module, path, self.sandbox, earlier and earlier[0], self.request.symbolic)
        self.graphs[path] = (recorder, guard)
        for name, value in Call(guard.parameters, module, args, kwargs).values.items():
            recorder.parameter(name, value, name in guard.placeholders)
        self.sandbox.forget_results()  # results of another graph's nodes
        self.stack.append(recorder)
        try:
            with private.recorded():
                out = self.run_recorded(recorder, call, module, args, kwargs)
        finally:
            self.stack.pop()
        self.sandbox.forget_results()
        recorder.output(self._with_assigned(recorder, out))
        guard.expect(recorder.graph)
        return out

    def _with_assigned(self, recorder: Recorder, out: Any) -> Any:
        """Return the output of the graph: the forward's result, with the values left in attributes if asked."""
        if self.request.assigned == "returned":
            return out, assigned_values(recorder)
        if self.request.assigned == "noted":
            mark_assigned_tensors(recorder)
        return out

    def run_recorded(self, recorder: Recorder, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module whose operations are recorded. A traced module runs its original forward, or its rewritten graph."""
        if not isinstance(module, TracedModule):
            return call(module, *args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run_traced(recorder, module, args, kwargs)

        if call is type(module).forward:
            return forward(*args, **kwargs)
        with innermost_forward(module, forward):
            return call(module, *args, **kwargs)

    def _run_traced(self, recorder: Recorder, module: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        variants = variants_of(module)
        assert variants is not None
        if not variants.is_rewritten:
            original = variants.before_trace(module)
            recorder.add_alias(original, module)
            if isinstance(original, TracedModule):
                return self._run_traced(recorder, original, args, kwargs)
            return type(original).forward(original, *args, **kwargs)
        with self._pause_recording():
            graph, inputs, reads = variants.graph_for(module, args, kwargs)
        inside = recorder.modules[id(module)][0]
        recorder.inlined |= {paths.join(inside, path) for path in variants.inlined_modules(graph)}
        for path, name in reads:
            recorder.reads.add((id(module.get_submodule(path)), name))
        return run_graph(module, graph, inputs, lambda node: recorder.inside_of(inside, node))

    def apply(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record an autograd function as one call."""
        recorder = self.stack[-1]
        if recorder is None:
            return call(*args, **kwargs)
        with private.unrecorded(), self._pause_recording():
            return recorder.call_function(call, args, kwargs)

    def vmap(self, call: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a function under ``torch.vmap`` as one call, with the tensors that it captures."""
        recorder = self.stack[-1]
        if recorder is None:
            return call(function, *args, **kwargs)
        captured = CapturedFunction(function, call, private.modes_inside(self))
        with self._pause_recording():
            return recorder.call_captured(captured, lambda: call(function, *args, **kwargs), args, kwargs)

    def ask_mode(self, name: str, answer: Callable[[], bool]) -> bool:
        """Answer a query for a mode. Inside a ``torch.no_grad`` of the forward the answer is always the same."""
        recorder = self.stack[-1]
        if recorder is not None and is_uncertain_query(name, 1) and not recorder.grad_switches:
            recorder.expect(answer(), name)
        return answer()

    @property
    def has_only_yes_or_no(self) -> bool:
        """True if the graphs check answers of two values alone, so that few graphs serve all batches.

        Shapes of results of modules that read values are checked, too; they are taken to be the same for all batches.
        """
        shapes = ("shape",) if not self.sandbox.mode.shape_reads else ()
        nodes = (node for each in self.recorders.values() for node in each.graph.find_nodes(op="call_function", target=expect))
        return all(isinstance(node.args[0], bool) or node.args[1] in shapes for node in nodes)

    @property
    def recorders(self) -> dict[str, Recorder]:
        return {path: recorder for path, (recorder, _) in self.graphs.items()}

    def read(self, module: nn.Module, name: str, value: Any) -> Any:
        recorder = self.stack[-1]
        if name in MODULE_ATTRIBUTES:
            return value
        if recorder is not None:
            found = recorder.attribute(module, name, value)
            return value if self.settings.differs(module, name) else found
        self.read_by.setdefault((id(module), name), set()).add(id(self.running))
        return value

    def write(self, module: nn.Module, name: str) -> None:
        if (recorder := self.stack[-1]) is not None:
            recorder.writes.add((id(module), name))

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        memo = {id(module): module for module in self.root.modules()}
        args, kwargs = replace_tensors((args, kwargs), self.sandbox.enter_input, memo)
        handlers = self.module_call, self.apply, self.read, self.ask_mode, self.write
        with private.intercept(*handlers), private.intercept_vmap(self.vmap), self:
            try:
                self.root(*args, **kwargs)
            except _TargetTraced:
                return
            except TraceError:
                raise
            except Exception as err:
                meta = any(tensor.is_meta for tensor in self.sandbox.originals.values())
                note = "; its weights are on the meta device, so it cannot run on real tensors instead" if meta else ""
                text = f"the forward does not run: {type(err).__name__}: {err}{note}"
                raise TraceError(text, source=model_source(err), failing_module=getattr(err, _FAILING_MODULE, None)) from err

    def check_state(self, again: Callable[[], Session]) -> None:
        """Raise ``TraceError`` if the forward leaves another state, unless the next call, run by ``again``, is the same."""
        changed = list(state_changes(self.target.modules(), self.sandbox.state.values()))
        inside = {id(module) for whole in self.whole.values() for module in whole.modules()}
        own = [change for change in changed if id(change.module) not in inside]
        shared = {change.first for change in own}
        others = [change for change in changed if change.first not in shared]
        self._mark_changes(others)
        for recorder in self.recorders.values():
            for module, name, *_ in others:
                if (id(module), name) in recorder.reads and name in vars(module):
                    what = f"attribute {name!r} of {self.paths[id(module)]!r}, which changes inside a module kept whole"
                    raise TraceError(f"the forward reads the {what}; keep what reads it whole too, with leaf_modules")
        for module, name, first, _ in changed:
            if first in shared:
                value = vars(module).get(name, torch.empty(0))  # a name without attribute is a buffer
                self.filled[id(module), name] = None if has_tensor(value) else attribute_facts(value)
        if own:
            modules = [module for module in self.target.modules() if id(module) not in inside]
            written = self._written_attributes(own) if self.sandbox.answers else set()
            assigned = {change[:2] for change in own if change.is_whole and self.request.assigned != "refused"}
            repeat = RepeatedRun(self.recorders, modules, self.sandbox.state.values(), written, assigned)
            if found := repeat.difference(again().recorders, own[0]):
                what = f"the forward of a {type(found[0]).__name__} assigns to its attribute {found[1]!r} or changes it"
                advice = "leave the assignment out, or keep the module whole with leaf_modules"
                raise TraceError(f"{what}, which a graph cannot repeat; {advice}", failing_module=self.paths.get(id(found[0])))

    def _written_attributes(self, changed: list[StateChange]) -> set[tuple[int, str]]:
        """Return the attributes, by module id and name, that now hold a tensor without gradient. A graph does not set them."""
        values = {(id(module), name): vars(module).get(name) for module, name, *_ in changed}
        written = {key for key, value in values.items() if isinstance(value, torch.Tensor) and not value.requires_grad}
        for module, name, *_ in changed:
            if (id(module), name) in written:
                _warn_of_unrepeated_write(self.paths[id(module)], type(module).__name__, name)
        return written

    def _mark_changes(self, changed: list[StateChange]) -> None:
        """Note at calls of whole modules the state that they may have changed, or read while others changed it."""
        found: dict[int, list[str]] = {}
        for module, name, (first, there), _ in changed:
            for holder in {id(module), *self.read_by.get((id(module), name), ())}:
                found.setdefault(holder, []).append(f"{self.paths[id(first)]}.{there}")
        tensors = self.sandbox.changed_tensors()
        for module in self.target.modules() if tensors else ():
            held = [*module._parameters.items(), *module._buffers.items()]
            places = [f"{self.paths[id(module)]}.{name}" for name, tensor in held if id(tensor) in tensors]
            found.setdefault(id(module), []).extend(places)
        for recorder in self.recorders.values() if found else ():
            for node in recorder.graph.find_nodes(op="call_module"):
                modules = recorder.module.get_submodule(str(node.target)).modules()
                node.meta["changes"] = tuple(place for module in modules for place in found.get(id(module), ()))
