"""The default tracer: run the forward once and record what it does, with values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from ..errors import TraceError
from ..wrapping import is_opaque
from . import _torch_private as private
from .calls import model_source
from .guard import Guard
from .recorder import Recorder
from .sandbox import OtherRandomNumbers, Sandbox
from .structures import distinct, replace_tensors
from .traced_module import TracedModule

Kind = Literal["leaf", "inline", "graph"]
Plan = Callable[[str, nn.Module], Kind]
"""What happens when a module is called: it stays whole, is recorded into its caller's graph, or gets a graph of its own."""


class _Session(TorchFunctionMode):
    """One run of the root's forward, with a recorder for every module that gets a graph."""

    def __init__(self, root: nn.Module, target: str, plan: Plan, sandbox: Sandbox) -> None:
        super().__init__()
        self.root, self.plan, self.sandbox = root, plan, sandbox
        self.target = root.get_submodule(target)
        self.paths = {id(module): name for name, module in root.named_modules()}
        self.stack: list[Recorder | None] = [None]  # None: what runs now is not recorded
        self.inlined: dict[int, nn.Module] = {}
        self.graphs: dict[str, tuple[Recorder, Guard]] = {}

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
        if kind != "leaf":
            self.inlined[id(module)] = module
        if kind == "inline":
            return call(module, *args, **kwargs)
        with private.unrecorded():
            run = self.record if kind == "graph" else self.run_whole
            return recorder.call_module(module, args, kwargs, lambda: run(call, module, args, kwargs))

    def run_whole(self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module unrecorded; random numbers of Python and NumPy it draws are its own."""
        others = OtherRandomNumbers()
        self.stack.append(None)
        try:
            return call(module, *args, **kwargs)
        finally:
            self.stack.pop()
            if others.changed():
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
        recorder = Recorder(module, path, self.sandbox)
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

    def moved(self, new: Any, old: Any) -> bool:
        """Whether a tensor has the values of another, on the device and in the type of today."""
        for recorder, _ in self.graphs.values():
            node = recorder.nodes.get(id(new))
            if (
                node is not None
                and node.target in ("to", "cpu", "cuda", "type_as")
                and node.args[0] is recorder.nodes.get(id(old))
            ):
                return True
        return False

    def varies(self, value: Any) -> bool:
        """Whether a tensor, or a tensor inside a container, is made from an input of its graph."""
        if type(value) in (tuple, list, dict):
            return any(map(self.varies, value.values() if type(value) is dict else value))
        if not isinstance(value, torch.Tensor):
            return False
        todo = [recorder.nodes[id(value)] for recorder, _ in self.graphs.values() if id(value) in recorder.nodes]
        seen: set[fx.Node] = set()
        for node in todo:
            if node not in seen:
                seen.add(node)
                todo += node.all_input_nodes
        return any(node.op == "placeholder" for node in seen)

    def apply(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An autograd function is recorded as one call."""
        recorder = self.stack[-1]
        if recorder is None:
            return call(*args, **kwargs)
        with private.unrecorded():
            return recorder.call_function(call, args, kwargs)


def trace_value(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan, target: str = "") -> TracedModule:
    """The graph of ``root.get_submodule(target)`` with the inputs it gets when the root runs on ``args`` and ``kwargs``.

    Fake tensors first; where they cannot follow (a leaf that looks at values, an operator without a fake kernel), real ones.
    """
    try:
        session = _run(root, args, kwargs, plan, target, fake=True)
    except _ForwardFailed as failed:
        if any(tensor.is_meta for tensor in [*root.parameters(), *root.buffers()]):
            note = "; its weights are on the meta device, so it cannot run on real tensors instead"
            raise failed.as_trace_error(note) from failed.__cause__
        try:
            session = _run(root, args, kwargs, plan, target, fake=False)
        except _ForwardFailed as again:
            raise again.as_trace_error() from again.__cause__
    return _assemble(root, session, target)


class _ForwardFailed(Exception):
    """The model's own code raised; what fake tensors cannot do comes as any type."""

    def as_trace_error(self, note: str = "") -> TraceError:
        err = self.__cause__
        assert err is not None
        text = f"the forward does not run: {type(err).__name__}: {err}{note}"
        return TraceError(text, source=model_source(err))


def _run(root: nn.Module, args: Any, kwargs: Any, plan: Plan, target: str, *, fake: bool) -> _Session:
    sandbox = Sandbox(root, (args, kwargs), fake=fake)
    with sandbox.open():
        memo = {id(module): module for module in root.modules()}
        args, kwargs = replace_tensors((args, kwargs), sandbox.enter_input, memo)
        session = _Session(root, target, plan, sandbox)
        with private.intercept(session.module_call, session.apply), session:
            try:
                root(*args, **kwargs)
            except TraceError:
                raise
            except Exception as err:
                raise _ForwardFailed from err
        sandbox.check_unchanged([session.target, *session.inlined.values()], session.moved, session.varies)
    if target not in session.graphs:
        raise TraceError(f"{target!r} is not called when the model runs on the example inputs; trace another module")
    return session


def _assemble(root: nn.Module, session: _Session, target: str) -> TracedModule:
    """Traced modules from the inside out: each holds the ones inside it in place of the originals."""
    made: dict[str, nn.Module] = {}
    for path, (recorder, guard) in sorted(session.graphs.items(), key=lambda item: -len(item[0])):
        if guard.refuse and path != target:
            continue
        inner = {
            name.removeprefix(f"{path}.") if path else name: module for name, module in made.items() if _inside(name, path)
        }
        made[path] = TracedModule(root.get_submodule(path), recorder.graph, guard, recorder.constants, inner)
    traced = made[target]
    assert isinstance(traced, TracedModule)
    return traced


def _inside(name: str, path: str) -> bool:
    return name != path and (not path or name.startswith(f"{path}."))
