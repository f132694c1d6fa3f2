"""Recording of a forward's operations on tensors into an fx graph, while the forward runs."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from random import Random
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from slapo_core import TraceError

from ..nodes import _torch_private as private
from ..nodes import mode_regions
from ..nodes.graph_functions import Slot, Template, expect, rebuild, set_state, setitem
from ..nodes.nested_values import ATOMS, Snapshot, by_reference, contents, getter, has_tensor, replace_tensors, tensors_in, walk
from ..nodes.symbolic_sizes import SIZE, Size, size_of
from ..nodes.torch_calls import (
    SHAPES,
    VALUE_READS,
    Effects,
    is_dynamic,
    is_metadata,
    is_uncertain_query,
    model_source,
    name_of,
    node_form,
)
from .attribute_reads import first_weight
from .data_dependence import ConstantValues, certain_comparison
from .sandbox import Sandbox
from .vmapped_functions import CapturedFunction, call_captured


class TrackedObject:
    """Object, list or dict that the forward may change; it stays one object in the graph.

    ``node`` is None for a container that is part of the graph, which must not change.
    """

    def __init__(self, value: Any, node: fx.Node | None) -> None:
        self.value, self.node = value, node
        self.known = Snapshot(value)

    def refresh(self) -> None:
        self.known = Snapshot(self.value)


class Recorder:
    """Graph of one module's forward, under construction.

    Args:
        module: Module whose forward is recorded; node targets are paths below it.
        path: Path of the module in the model, for messages.
        sandbox: Substitutes that the forward runs on.
        earlier: Recorder of the first call, if this is the second: its values may have been kept.
        symbolic: True to make sizes nodes of the graph; else they are the integers of this call.
    """

    def __init__(
        self, module: nn.Module, path: str, sandbox: Sandbox, earlier: Recorder | None = None, symbolic: bool = False
    ) -> None:
        self.module, self.sandbox, self.earlier, self.symbolic = module, sandbox, earlier, symbolic
        self.sizes: dict[tuple[Any, ...], fx.Node] = {}
        self.label = path or type(module).__name__
        self.graph = fx.Graph()
        self.known = ConstantValues(self.graph)
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[Any] = []  # ids stay unique while the values live
        self.objects: dict[int, TrackedObject] = {}
        self.passed: list[TrackedObject] = []
        self.containers: list[TrackedObject] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.modules = {id(child): (name, child) for name, child in module.named_modules()}
        self.state = {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
        self.reads: set[tuple[int, str]] = set()
        """Attributes the forward has read: id of the module, and name."""
        self.reads_before: set[tuple[int, str]] = set()
        """Attributes the forward has read with the value from before the run."""
        self.writes: set[tuple[int, str]] = set()
        """Attributes the forward has set, whatever the value."""
        self.assigned: list[str] = []
        """Dotted paths of the attributes that the forward has assigned."""
        self.inlined: set[str] = set()
        """Paths of the modules that were inlined."""
        self.inside = [""]
        """Paths of the inlined modules that run now, outermost first."""
        self.is_rewrite = False
        """True while operations run that a rewrite put into a graph."""
        self.baseline = mode_regions.current_modes()
        self.grad_switches = 0

    def attributes(self, caches: dict[tuple[int, str], Any]) -> tuple[set[tuple[str, str]], dict[tuple[str, str], Any]]:
        """Return path and name of the attributes that the graph depends on, and the values of caches among them.

        Caches of tensors are left out.
        """
        named = {(key, name): (self.modules[key][0], name) for key, name in self.reads if key in self.modules}
        filled = {named[key]: caches[key] for key in named.keys() & caches}
        return {key for key in named.values() if filled.get(key, key) is not None}, filled

    def _refusal(self, what: str, instead: str = "") -> TraceError:
        keep = f"keep the module that does it whole with leaf_modules{instead}"
        return TraceError(f"{self.label}: {what}; {keep}", source=model_source())

    def inline_module(self, module: nn.Module) -> AbstractContextManager[None]:
        """Attribute the recorded nodes of a ``with`` block to an inlined module."""
        path = self.modules[id(module)][0]
        self.inlined.add(path)
        return self._inside_path(path)

    @contextmanager
    def _inside_path(self, path: str) -> Iterator[None]:
        self.inside.append(path)
        try:
            yield
        finally:
            self.inside.pop()
            self.is_rewrite = False

    def inside_of(self, path: str, node: fx.Node) -> AbstractContextManager[None]:
        """Attribute the recorded nodes of a ``with`` block to the module of a node of another graph, the one of ``path``."""
        self.is_rewrite = node.meta.get("is_rewrite", False)
        return self._inside_path(".".join(filter(None, (path, node.meta.get("module", "")))))

    def add_alias(self, other: nn.Module, module: nn.Module) -> None:
        """Register ``other``, which shares the attributes, parameters and submodules of ``module``, as that module."""
        self.modules[id(other)] = self.modules[id(module)]
        self.alive.append(other)

    def argument(self, value: Any, exact: bool = False) -> Any:
        """Return the graph's form of a value that the forward uses.

        Without ``exact``, a ``torch.Size`` becomes a tuple, which torch's functions take as well.
        """
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        kind = type(value)
        if kind is Size:
            return self.size(value)
        if kind is torch.Size and exact:
            return self._create("call_function", torch.Size, (self.argument(tuple(value)),), {}, None)
        if kind in (tuple, list, torch.Size):
            return (list if kind is list else tuple)([self.argument(part, exact) for part in value])
        if kind is dict:
            return {key: self.argument(part, exact) for key, part in value.items()}
        if kind is slice:
            return slice(*map(self.argument, (value.start, value.stop, value.step)))
        return value if by_reference(value) else self.object(value)

    def tensor(self, value: torch.Tensor) -> fx.Node:
        """Return the node of a tensor: recorded, a weight, inside an object, or a constant."""
        node = self.nodes.get(id(value))
        if node is None:
            name = self.state.get(id(value))
            node = self._earlier_value(value)
            if node is None and name:
                node = self._create("get_attr", name, (), {}, value)
            node = node or self._inside_object(value) or self._constant(value)
            self._bind_tensor(node, value)
        return node

    def size(self, value: Size) -> fx.Node | int:
        """Return the node of a size, or its integer if the size comes from another graph."""
        function, *given = value.form
        if function == "get_attr" and given.pop(0) is not self.graph:
            return int(value)
        operands = tuple(self.size(operand) if type(operand) is Size else operand for operand in given)
        nodes = [operand for operand in operands if isinstance(operand, fx.Node)]
        if any(node.graph is not self.graph for node in nodes) or not (nodes or function == "get_attr"):
            return int(value)
        key = (function, *operands)
        if key not in self.sizes:
            op = "call_method" if function == "size" else "get_attr" if function == "get_attr" else "call_function"
            target, args = (operands[0], ()) if op == "get_attr" else (function, operands)
            self.sizes[key] = self._create(op, target, args, {}, None)
            self.sizes[key].meta[SIZE] = int(value)
        return self.sizes[key]

    def attribute(self, module: nn.Module, name: str, value: Any) -> Any:
        """Return the value of an attribute that the forward reads; an integer records its origin."""
        self.reads.add((id(module), name))
        if self.sandbox.attributes_before(module).get(name) is value:
            self.reads_before.add((id(module), name))
        if hasattr(type(value), "__next__") or isinstance(value, Random):
            raise self._refusal(f"the forward reads {name!r}, which returns a different value each time")
        if not self.symbolic or type(value) is not int or id(module) not in self.modules or name not in vars(module):
            return value
        return Size(value, "get_attr", self.graph, ".".join(filter(None, (self.modules[id(module)][0], name))))

    def _earlier_value(self, value: torch.Tensor) -> fx.Node | None:
        earlier = self.earlier.nodes.get(id(value)) if self.earlier else None
        if earlier is None or earlier.op == "get_attr" or id(value) in self.sandbox.originals:
            return None
        node = self._create("get_attr", "kept", (), {}, value)
        node.meta["earlier"] = earlier
        return node

    def _inside_object(self, value: torch.Tensor) -> fx.Node | None:
        for tracked in self.objects.values():
            path = next((path for path, part, _ in walk(tracked.value) if part is value), None)
            node, holder = tracked.node, tracked.value
            for key in path or ():
                get, holder = getter(holder), getter(holder)(holder, key)
                node = self._create("call_function", get, (node, key), {}, holder)
            if path is not None:
                return node
        return None

    def _constant(self, value: torch.Tensor) -> fx.Node:
        """Return the node of a tensor that existed before and is not in the model; refuse any other."""
        if id(value) in self.sandbox.originals or isinstance(value, private.FakeTensor) or self.sandbox.is_new(value):
            raise self._refusal(f"a tensor {list(value.shape)} comes from code that tracing does not see")
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = value
        return self._create("get_attr", name, (), {}, value)

    def object(self, value: Any) -> Any:
        """Return the node of an object, after recording the changes since the graph last used it."""
        if (tracked := self.objects.get(id(value))) is not None:
            self.write_changes(tracked)
            return tracked.node
        if id(value) in self.shared_objects and not has_tensor(value):
            return value
        memo = _SlotMemo(self)
        try:
            template = Template(replace_tensors(value, memo.tensor, memo), memo.slots, memo.kept)
        except (AttributeError, TypeError) as err:  # its constructor, or its own way of copying, works on tensors alone
            raise self._refusal(f"the forward makes a {type(value).__name__}, which a graph cannot make anew") from err
        node = self._create("call_function", rebuild, (template, memo.nodes), {}, None)
        self.objects[id(value)] = TrackedObject(value, node)
        self.passed.append(self.objects[id(value)])
        return node

    def write_changes(self, tracked: TrackedObject) -> None:
        """Record the changes that Python code made to a tracked object that the graph is about to use."""
        self.passed.append(tracked)
        done: list[tuple[Any, ...]] = []
        for path in tracked.known.changed_paths():
            if any(path[: len(outer)] == outer for outer in done):
                continue  # the outer change brings the new inner object along
            if tracked.node is None:
                raise self._refusal("the forward changes a list or dict it was given")
            part, old = tracked.known.parts[path]
            new = contents(part) or {}
            content = {key: self.argument(v) for key, v in new.items() if key not in old or old[key] is not v}
            drop = [key for key in old if key not in new]
            self._create("call_function", set_state, (tracked.node, path, content, drop), {}, None)
            done += [(*path, key) for key in content]
        tracked.refresh()

    @cached_property
    def shared_objects(self) -> dict[int, Any]:
        """Objects that the modules hold, such as configs, which a graph may hold too."""
        held = {id(value): value for _, module in self.modules.values() for value in vars(module).values()}
        return {**held, **{key: module for key, (_, module) in self.modules.items()}}

    def _create(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta.update(source=model_source(), module=self.inside[-1], is_rewrite=self.is_rewrite)
        node.meta.update(regions=mode_regions.current_modes(self.baseline, self.grad_switches > 0))
        if isinstance(value, torch.Tensor):
            node.meta["val"] = self.sandbox.fake_of(value)
        if not self.sandbox.fake and op not in ("placeholder", "get_attr"):
            node.meta["dynamic"] = is_dynamic(node)
        return node

    def parameter(self, name: str, value: Any, is_input: bool) -> None:
        """Add an argument of the forward: as a placeholder, or as part of the graph."""
        node = self._create("placeholder", name, (), {}, value) if is_input else None
        if node is not None:
            self._bind(node, value)
        if isinstance(value, (list, dict)):
            self.containers.append(TrackedObject(value, node))

    def output(self, value: Any) -> None:
        """End the graph with its output."""
        result = self.argument(value, exact=True)
        for tracked in [*self.objects.values(), *self.containers]:
            self.write_changes(tracked)
        self.graph.output(result)
        for node in reversed(self.graph.nodes):
            if not node.users and (node.op == "get_attr" or SIZE in node.meta or node.target in (operator.getitem, getattr)):
                self.graph.erase_node(node)
        mode_regions.write_mode_nodes(self.graph)

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Run a module that stays whole and record the call."""
        self.passed = []
        node_args, node_kwargs = self.argument(args, exact=True), self.argument(kwargs, exact=True)
        passed, effects, value_reads = self.passed, Effects(args, kwargs, self.sandbox.watch), self.sandbox.mode.value_reads
        out = call()
        self.reads.update(first_weight(module))  # results have its dtype
        node = self._create("call_module", self.modules[id(module)][0], node_args, node_kwargs, out)
        for tracked in passed:
            tracked.refresh()
        self._note_value_reads(node, value_reads)
        return self._bind(node, out, self._mark(node, effects))

    def call_captured(self, function: CapturedFunction, run: Callable[[], Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a function that the forward passed to ``torch.vmap`` and record the call."""
        if function.foreign is not None:
            what = f"the forward hands torch.vmap a function that holds a {type(function.foreign).__name__}"
            raise self._refusal(what, "; give it tensors alone")
        given = (function.tensors, args, kwargs)
        nodes = self.argument(given)
        effects, value_reads = Effects(given, {}, self.sandbox.watch), self.sandbox.mode.value_reads
        out = run()
        node = self._create("call_function", call_captured, (function.without_tensors(), *nodes), {}, out)
        self._note_value_reads(node, value_reads)
        return self._bind(node, out, self._mark(node, effects))

    def call_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function, and record it if it makes or changes a tensor."""
        name = name_of(func)
        if name == "_set_grad_enabled":  # two or three calls up is torch.no_grad or the like
            back = "__exit__" in (sys._getframe(2).f_code.co_name, sys._getframe(3).f_code.co_name)
            self.grad_switches += -1 if back else 1
            return func(*args)
        if is_metadata(func, name):
            if name in SHAPES and not self.sandbox.fake:
                self._pin_shape(args[0])
            answer = func(*args, **kwargs)
            if self.symbolic and name in ("shape", "size", "numel"):
                return self._with_origin(answer, *args, **kwargs)
            if is_uncertain_query(name, 2):  # of two nodes of autograd only whether there is one can be compared
                self.expect(*((answer is None, "is_leaf") if name == "grad_fn" else (answer, name)), *args, **kwargs)
            return answer
        if name in ("register_hook", "register_post_accumulate_grad_hook", "backward"):
            raise self._refusal(f"the forward calls {name} on a tensor, which a graph cannot repeat")
        effects = Effects(args, kwargs, self.sandbox.watch)
        if name in VALUE_READS and effects.tensors:
            return self._ask(func, name, args, kwargs)
        value_reads = self.sandbox.mode.value_reads
        out = func(*args, **kwargs)
        if not has_tensor(out) and not effects.changed_arguments() and func.__name__ != "__set__":
            is_fact = not effects.tensors or (self.sandbox.fake and value_reads == self.sandbox.mode.value_reads)
            return out if is_fact else self._ask(func, name, args, kwargs)
        if isinstance(out, (tuple, list)) and not self.sandbox.fake:
            for tensor in effects.tensors:
                self._pin_shape(tensor)
        op, target, args = node_form(func, name, args)
        target = name if op == "call_method" else target
        node = self._create(op, target, self.argument(args), self.argument(kwargs), out)
        self._note_value_reads(node, value_reads)
        changed = self._mark(node, effects)
        if target is setitem:
            self._rebind(args[0], node)
            return None
        return self._bind(node, out, changed)

    def _with_origin(self, answer: Any, tensor: torch.Tensor, dim: Any = None) -> Any:
        node = self.nodes.get(id(tensor)) or (self.tensor(tensor) if id(tensor) in self.state else None)
        return answer if node is None else size_of(tensor, node, answer, dim)

    def _mark(self, node: fx.Node, effects: Effects) -> set[int]:
        """Note the inputs that a call has changed in place, by their positions among the node's inputs, and random draws."""
        changed, node.meta["draws"] = effects.changed_arguments(), effects.has_drawn()
        if changed:
            nodes: set[fx.Node | None] = {self.nodes[key] for key in changed if key in self.nodes}
            nodes |= {held.node for held in self.objects.values() if any(id(t) in changed for t in tensors_in(held.value))}
            node.meta["mutates"] = tuple(place for place, other in enumerate(node.all_input_nodes) if other in nodes)
        return changed

    def _note_value_reads(self, node: fx.Node, before: int) -> None:
        """Mark a node whose results may have other shapes for other input values; ``_bind_tensor`` then pins these shapes."""
        if self.sandbox.answers and self.sandbox.mode.value_reads > before:
            node.meta["dynamic"] = True

    def _pin_shape(self, value: Any) -> None:
        """Make the graph check a shape that Python sees and that may differ in the next call."""
        if (node := self.nodes.get(id(value))) is not None and node.meta.get("dynamic"):
            node.meta["dynamic"] = False
            self._create("call_function", expect, (tuple(value.shape), "shape", node), {}, None)

    def expect(self, answer: Any, name: str, *args: Any, **kwargs: Any) -> None:
        """Make the graph check an answer that Python got and that may differ in the next call."""
        self._create("call_function", expect, (answer, name, *self.argument(args)), self.argument(kwargs), None)

    def _ask(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a query for a tensor's values, if the answer is the same at every call."""
        node_args = self.argument(args)
        if name == "__bool__" and (decided := certain_comparison(node_args[0])) is not None:
            return decided
        values = [self.known.of(arg) if isinstance(arg, fx.Node) else arg for arg in node_args]
        if any(value is None for value in values):
            if self.sandbox.answers and hasattr(torch.Tensor, name) and self._is_of_inputs(node_args):
                answer = func(*args, **kwargs)
                if isinstance(answer, (bool, int, float, list)):
                    self.expect(answer, name, *args, **kwargs)
                    return answer
            what = f"the forward asks for the values of a tensor ({name.strip('_')}), so what it does depends on the data"
            raise self._refusal(what, ", or avoid the question")
        return func(*values, **kwargs)

    def _is_of_inputs(self, arguments: Any) -> bool:
        """Return True if values are computed from the forward's inputs alone: no parameter, module or random number."""
        work = [node for node in tree_leaves(arguments) if isinstance(node, fx.Node)]
        seen = set(work)
        while work:
            node = work.pop()
            is_own = node.op == "get_attr" and node.target not in self.constants
            if is_own or node.op == "call_module" or node.meta.get("draws"):
                return False
            work += (new := [other for other in node.all_input_nodes if other not in seen])
            seen.update(new)
        return True

    def _bind(self, node: fx.Node, value: Any, changed: set[int] = frozenset()) -> Any:  # type: ignore[assignment]
        if isinstance(value, torch.Tensor):
            if id(value) in changed and id(value) in self.nodes:
                self._rebind(value, node)
                return value
            if id(value) in self.nodes and node.op != "placeholder":
                node.meta["alias"] = self.nodes[id(value)]
                value = value.view_as(value)  # the call gave back what it got: its result is a value of its own
            self._bind_tensor(node, value)
        elif isinstance(value, (dict, list, tuple)):
            parts = contents(value) or {}
            for key, part in parts.items():
                parts[key] = self._bind(self._create("call_function", operator.getitem, (node, key), {}, part), part, changed)
            return type(value)(parts.values()) if type(value) in (list, tuple) else value
        elif not by_reference(value):
            self.objects[id(value)] = TrackedObject(value, node)
            self.alive.append(value)
        return value

    def _bind_tensor(self, node: fx.Node, value: torch.Tensor) -> None:
        self.nodes[id(value)] = node
        self.alive.append(value)
        node.meta["memory"] = private.memory(value)
        if self.sandbox.answers and self.sandbox.fake:
            parent = node.args[0] if node.target is operator.getitem else None
            if isinstance(parent, fx.Node) and "val" not in parent.meta and parent.meta.get("dynamic"):
                node.meta["dynamic"] = True
            self._pin_shape(value)

    def _rebind(self, value: torch.Tensor, node: fx.Node) -> None:
        node.meta["val"] = self.sandbox.fake_of(value)
        self._bind_tensor(node, value)


class _SlotMemo(dict[int, Any]):
    """Memo of a deep copy that puts slots in place of tensors and tracked objects, and keeps shared objects."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.slots: list[Slot] = []
        self.nodes: list[fx.Node | None] = []
        self.kept: list[Any] = []

    def get(self, key: int, default: Any = None) -> Any:
        tracked, kept = self.recorder.objects.get(key), self.recorder.shared_objects.get(key)
        if key not in self and tracked is not None:
            self.recorder.write_changes(tracked)
            self[key] = self._slot(tracked.node)
        elif key not in self and not isinstance(kept, ATOMS):
            self.kept.append(kept)
            self[key] = kept
        return super().get(key, default)

    def tensor(self, tensor: torch.Tensor) -> Slot:
        return self._slot(self.recorder.tensor(tensor))

    def _slot(self, node: fx.Node | None) -> Slot:
        self.slots.append(Slot())
        self.nodes.append(node)
        return self.slots[-1]
