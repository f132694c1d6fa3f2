"""The default tracer: run the forward once and record what it does, with values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import TraceError
from ..wrapping import is_opaque
from . import _torch_private as private
from .attributes import OF_TORCH, Attributes, facts_of
from .calls import is_open, model_source
from .graph_ops import expect
from .guard import Guard
from .recorder import Recorder
from .sandbox import OtherRandomNumbers, Sandbox
from .state import Change, Repeat, changes
from .structures import distinct, has_tensor, replace_tensors
from .traced_module import TracedModule

Kind = Literal["leaf", "inline", "graph"]
Plan = Callable[[str, nn.Module], Kind]
"""What happens when a module is called: it stays whole, is recorded into its caller's graph, or gets a graph of its own."""


class _Session(TorchFunctionMode):
    """One run of the root's forward, with a recorder for every module that gets a graph."""

    def __init__(self, root: nn.Module, target: str, plan: Plan, sandbox: Sandbox, earlier: _Session | None = None) -> None:
        super().__init__()
        self.root, self.plan, self.sandbox, self.earlier = root, plan, sandbox, earlier
        self.running = self.target = root.get_submodule(target)
        self.paths = {id(module): name for name, module in root.named_modules()}
        self.stack: list[Recorder | None] = [None]  # None: what runs now is not recorded
        self.whole: dict[int, nn.Module] = {}
        self.read_by: dict[tuple[int, str], set[int]] = {}
        """Attributes that are read while a module kept whole is ``running``, with the modules; all by id."""
        self.graphs: dict[str, tuple[Recorder, Guard]] = {}
        self.filled: dict[tuple[int, str], Any] = {}
        """Attributes that serve as caches, with what is in them after the forward; None for tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.stack[-1]
        return func(*args, **kwargs) if recorder is None else recorder.call_function(func, args, kwargs)

    def module_call(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        recorder = self.stack[-1]
        if recorder is None:
            if module is not self.target or self.graphs:
                return call(module, *args, **kwargs)
            with private.unrecorded():
                return self.record(call, module, args, kwargs)
        if id(module) not in recorder.modules:
            return call(module, *args, **kwargs)
        path = self.paths[id(module)]
        kind = "leaf" if is_opaque(module) else self.plan(path, module)
        if kind == "leaf":
            self.whole[id(module)] = module
        if kind == "inline":
            with recorder.within(module):
                return call(module, *args, **kwargs)
        with private.unrecorded():
            run = self.record if kind == "graph" else self.run_whole
            return recorder.call_module(module, args, kwargs, lambda: run(call, module, args, kwargs))

    def run_whole(self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module unrecorded; random numbers of Python and NumPy it draws are its own."""
        others, self.running = OtherRandomNumbers(), module
        self.stack.append(None)
        try:
            return call(module, *args, **kwargs)
        finally:
            self.stack.pop()
            others.put_back()

    def record(self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module and make its graph; a second call with other arguments leaves the module without one."""
        path = self.paths[id(module)]
        guard = Guard.of(module, args, kwargs)
        if path in self.graphs:
            if self.graphs[path][1] != guard:
                self.graphs[path][1].refuse = True
            return self.run_whole(call, module, args, kwargs)
        args, kwargs = distinct((args, kwargs), set())
        earlier = self.earlier.graphs.get(path) if self.earlier else None
        recorder = Recorder(module, path, self.sandbox, earlier and earlier[0])
        self.graphs[path] = (recorder, guard)
        for name, value in guard.values(args, kwargs).items():
            recorder.parameter(name, value, name in guard.placeholders)
        self.sandbox.forget_results()  # what another graph's nodes made
        self.stack.append(recorder)
        try:
            with private.recorded():
                out = call(module, *args, **kwargs)
        finally:
            self.stack.pop()
        self.sandbox.forget_results()
        recorder.output(out)
        return out

    def apply(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An autograd function is recorded as one call."""
        recorder = self.stack[-1]
        if recorder is None:
            return call(*args, **kwargs)
        with private.unrecorded():
            return recorder.call_function(call, args, kwargs)

    def ask_mode(self, name: str, answer: Callable[[], bool]) -> bool:
        """Code asks torch for a mode; inside a ``torch.no_grad`` of the forward the answer is always the same."""
        recorder = self.stack[-1]
        if recorder is not None and is_open(name, 1) and not recorder.grad_switches:
            recorder.expect(answer(), name)
        return answer()

    @property
    def recorders(self) -> dict[str, Recorder]:
        """Path of each module with a graph to what records it."""
        return {path: recorder for path, (recorder, _) in self.graphs.items()}

    def read(self, module: nn.Module, name: str) -> None:
        """An attribute is read."""
        recorder = self.stack[-1]
        if name not in OF_TORCH:
            seen = self.read_by.setdefault((id(module), name), set())
            seen.add(id(self.running)) if recorder is None else recorder.reads.add((id(module), name))

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the root's forward."""
        memo = {id(module): module for module in self.root.modules()}
        args, kwargs = replace_tensors((args, kwargs), self.sandbox.enter_input, memo)
        with private.intercept(self.module_call, self.apply, self.read, self.ask_mode), self:
            try:
                self.root(*args, **kwargs)
            except TraceError:
                raise
            except Exception as err:
                meta = any(tensor.is_meta for tensor in self.sandbox.originals.values())
                note = "; its weights are on the meta device, so it cannot run on real tensors instead" if meta else ""
                text = f"the forward does not run: {type(err).__name__}: {err}{note}"
                raise TraceError(text, source=model_source(err)) from err

    def check_state(self, again: Callable[[], _Session]) -> None:
        """Refuse a forward that leaves its modules in another state, unless ``again``, the next call, does the same.

        Raises:
            TraceError: A graph would not do as the forward does at the next call.
        """
        changed = list(changes(self.target.modules(), self.sandbox.state.values()))
        inside = {id(module) for whole in self.whole.values() for module in whole.modules()}
        own = [change for change in changed if id(change.module) not in inside]
        shared = {change.first for change in own}
        others = [change for change in changed if change.first not in shared]
        self._mark_changes(others)
        for recorder in self.recorders.values():
            for module, name, _ in others:
                if (id(module), name) in recorder.reads:
                    what = f"attribute {name!r} of {self.paths[id(module)]!r}, which changes inside a module kept whole"
                    raise TraceError(f"the forward reads the {what}; keep what reads it whole too, with leaf_modules")
        for module, name, first in changed:
            if first in shared:
                self.filled[id(module), name] = None if has_tensor(value := vars(module).get(name)) else facts_of(value)
        if own:
            modules = [module for module in self.target.modules() if id(module) not in inside]
            repeat = Repeat(self.recorders, modules, self.sandbox.state.values())
            if found := repeat.difference(again().recorders, own[0]):
                what = f"the forward of a {type(found[0]).__name__} assigns to its attribute {found[1]!r} or changes it"
                raise TraceError(f"{what}, which a graph cannot repeat; keep it whole with leaf_modules")

    def _mark_changes(self, changed: list[Change]) -> None:
        """Note at the calls of modules kept whole what they may have changed on themselves, or read of it."""
        found: dict[int, list[str]] = {}
        for module, name, (first, there) in changed:
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


def trace_value(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan, target: str = "") -> TracedModule:
    """The graph of ``root.get_submodule(target)`` with the inputs it gets when the root runs on ``args`` and ``kwargs``.

    Fake tensors first; where they cannot follow (a leaf that looks at values, an operator without a fake kernel), real ones.
    With gradients, unless the caller has turned them off and the forward asks.
    """
    session = _attempt(root, args, kwargs, plan, target, grad=True)
    asks = any(recorder.graph.find_nodes(op="call_function", target=expect) for recorder in session.recorders.values())
    if asks and not torch.is_grad_enabled():
        session = _attempt(root, args, kwargs, plan, target, grad=False)
    return _assemble(root, session, target)


def _attempt(root: nn.Module, args: Any, kwargs: Any, plan: Plan, target: str, *, grad: bool) -> _Session:
    try:
        return _run(root, args, kwargs, plan, target, fake=True, grad=grad)
    except TraceError as failed:
        if failed.__cause__ is None or any(tensor.is_meta for tensor in [*root.parameters(), *root.buffers()]):
            raise
        return _run(root, args, kwargs, plan, target, fake=False, grad=grad)


def _run(root: nn.Module, args: Any, kwargs: Any, plan: Plan, target: str, *, fake: bool, grad: bool) -> _Session:
    sandbox = Sandbox(root, (args, kwargs), fake=fake)
    with sandbox.open(grad):
        session = _Session(root, target, plan, sandbox)
        session.run(args, kwargs)
        if sandbox.random_numbers.changed():
            what = "the forward draws random numbers from Python or NumPy, which a graph cannot repeat"
            raise TraceError(f"{what}; keep the module that does it whole with leaf_modules")
        if target not in session.graphs:
            raise TraceError(f"{target!r} is not called when the model runs on the example inputs; trace another module")

        def again() -> _Session:
            second = _Session(root, target, plan, sandbox, session)
            second.run(args, kwargs)
            return second

        session.check_state(again)
    return session


def _assemble(root: nn.Module, session: _Session, target: str) -> TracedModule:
    """Traced modules from the inside out: each holds the ones inside it in place of the originals."""
    made: dict[str, nn.Module] = {}
    for path, (recorder, guard) in sorted(session.graphs.items(), key=lambda item: -len(item[0])):
        if guard.refuse and path != target:
            continue
        prefix = f"{path}." if path else ""
        inner = {name.removeprefix(prefix): module for name, module in made.items() if name.startswith(prefix)}
        module = root.get_submodule(path)
        guard.attributes = Attributes(module, *recorder.attributes(session.filled))
        made[path] = TracedModule(module, recorder.graph, guard, recorder.constants, inner)
    traced = made[target]
    assert isinstance(traced, TracedModule)
    return traced
