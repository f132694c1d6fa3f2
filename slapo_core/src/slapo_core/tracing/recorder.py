"""Record what one forward does to tensors into an fx graph, while it runs."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterator
from traceback import walk_stack, walk_tb
from typing import Any

import torch
from torch import fx, nn

from ..errors import TraceError
from . import _torch_private as private
from . import regions
from .escapes import KnownValues, chance_decided
from .sandbox import Sandbox
from .structures import ATOMS, Slot, Template, by_reference, contents, getter, has_tensor, rebuild, replace_tensors, walk

METADATA = frozenset(
    "shape size dim ndim ndimension dtype device layout stride storage_offset numel nelement element_size itemsize nbytes "
    "is_contiguous is_floating_point is_complex is_signed is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_leaf is_mkldnn is_xpu is_mps "
    "is_inference requires_grad grad_fn output_nr names name _version __len__ get_device is_tensor is_same_size is_conj is_neg is_shared "
    "is_pinned is_storage result_type can_cast type __hash__ __repr__ __format__ __dir__ _is_view retains_grad is_vulkan grad "
    "_is_param register_hook is_set_to is_coalesced is_distributed is_xla is_ipu is_maia is_hpu is_mtia is_sparse_csr".split()
)
"""What Python may ask a tensor without the answer depending on its values."""

SHAPES = frozenset("shape size numel nelement __len__ nbytes stride".split())
DYNAMIC = frozenset("nonzero argwhere masked_select unique unique_consecutive bincount repeat_interleave where".split())
"""What makes tensors of a shape that depends on values."""

ASKS_VALUES = frozenset(
    "item tolist __bool__ __int__ __float__ __index__ __complex__ __contains__ is_nonzero equal allclose numpy __array__ data_ptr".split()
)
"""What Python asks for values."""

_OPERATORS = {f"__{name.strip('_')}__": getattr(operator, name) for name in (
    "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift lt le eq ne gt ge neg invert abs pos getitem".split()
)}
_REFLECTED = {f"__r{name.strip('_')}__": getattr(operator, name) for name in (
    "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()
)}
_TORCH, _HERE = os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep
_PLUMBING = ("contextlib.py", "inspect.py", "functools.py", "copy.py")


def setitem(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """``tensor[index] = value``, then the tensor: so that later uses depend on the assignment."""
    tensor[index] = value
    return tensor


def set_state(root: Any, path: tuple[Any, ...], content: dict[Any, Any], drop: list[Any]) -> None:
    """Change parts of an object as the forward did: attributes or items of what lies at ``path`` inside ``root``."""
    target = root
    for key in path:
        target = getter(target)(target, key)
    if isinstance(target, list):
        target[:] = [content.get(i, target[i] if i < len(target) else None) for i in range(content["len"])]
        return
    table = target if isinstance(target, dict) else target.__dict__
    for key in drop:
        del table[key]
    table.update(content)


def expect_shape(tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Check a shape that depends on data and that the forward's Python code has used.

    Raises:
        TraceError: It is another one at this call.
    """
    if tuple(tensor.shape) != shape:
        raise TraceError(
            f"a shape that depends on the data is {list(tensor.shape)}, traced as {list(shape)}; keep the module that uses it whole with leaf_modules"
        )


def _is_dynamic(node: fx.Node) -> bool:
    """Whether the result's shape may depend on data."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    vals = [other.meta.get("val") for other in node.all_input_nodes]
    by_mask = name == "getitem" and any(val is not None and val.dtype in (torch.bool, torch.uint8) for val in vals[1:])
    return node.op == "call_module" or name in DYNAMIC or by_mask or any(other.meta.get("dynamic") for other in node.all_input_nodes)


def model_source(err: BaseException | None = None) -> str | None:
    """``file:line`` of the model's own innermost frame: of this call, or of where ``err`` was raised; None when it has none."""
    frames: Iterator[tuple[Any, int]] = walk_stack(sys._getframe(1))
    if err is not None:
        frames = reversed(list(walk_tb(err.__traceback__)))
    inner = None
    for frame, line in frames:
        name = frame.f_code.co_filename
        if name.startswith(_TORCH):
            inner = inner or f"{name}:{line}"
        elif not name.startswith((_HERE, "<")) and not name.endswith(_PLUMBING):
            return f"{name}:{line}"
    return inner


class Tracked:
    """An object that is no plain container, whose state calls may change: it stays one object in the graph."""

    def __init__(self, value: Any, node: fx.Node | None) -> None:
        self.value, self.node = value, node
        self.parts: dict[tuple[Any, ...], tuple[Any, dict[Any, Any]]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take the state as it is now for known."""
        if self.parts and not self.changed():
            return
        self.parts = {path: (part, parts) for path, part in walk(self.value) if (parts := contents(part)) is not None}

    def changed(self) -> list[tuple[Any, ...]]:
        """Paths of the parts that are not as they were."""
        return [path for path, (part, old) in self.parts.items() if not _same(contents(part), old)]


def _same(new: dict[Any, Any] | None, old: dict[Any, Any]) -> bool:
    return new is not None and len(new) == len(old) and all(map(operator.is_, new.values(), old.values())) and new.keys() == old.keys()


class Recorder:
    """The graph of one module's forward, in the making.

    Args:
        module: Whose forward is recorded; node targets are paths from here.
        path: Where it is in the model, for messages.
        sandbox: The stand-ins the forward runs on.
    """

    def __init__(self, module: nn.Module, path: str, sandbox: Sandbox) -> None:
        self.path, self.sandbox = path, sandbox
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[Any] = []
        self.objects: dict[int, Tracked] = {}
        self.passed: list[Tracked] = []
        self.containers: dict[str, Tracked] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.paths = {id(child): name for name, child in module.named_modules()}
        self.modules = {id(child): child for child in module.modules()}
        self.state = {id(t): name for name, t in [*module.named_parameters(), *module.named_buffers()]}
        self.baseline = regions.current()
        self.shared: dict[int, Any] | None = None
        self.known = KnownValues(self.graph)

    # -- values to graph arguments

    def argument(self, value: Any) -> Any:
        """The graph's form of a value that the forward uses."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        kind = type(value)
        if kind in ATOMS:
            return value
        if kind in (tuple, list):
            return kind([self.argument(part) for part in value])
        if kind is torch.Size:
            return tuple(value)
        if kind is dict:
            return {key: self.argument(part) for key, part in value.items()}
        if kind is slice:
            return slice(*(self.argument(part) for part in (value.start, value.stop, value.step)))
        return value if by_reference(value) else self.object(value)

    def tensor(self, value: torch.Tensor) -> fx.Node:
        """The node of a tensor; an error when nothing recorded made it."""
        node = self.nodes.get(id(value))
        if node is None:
            node = self._state_node(value) or self._part_of_object(value) or self._constant(value)
            self._bind_tensor(node, value)
        return node

    def _state_node(self, value: torch.Tensor) -> fx.Node | None:
        name = self.state.get(id(value))
        return None if name is None else self._create("get_attr", name, (), {}, value)

    def _part_of_object(self, value: torch.Tensor) -> fx.Node | None:
        for tracked in self.objects.values():
            for path, part in walk(tracked.value):
                if part is value:
                    return self._follow(tracked.node, tracked.value, path, value)
        return None

    def _follow(self, node: fx.Node, root: Any, path: tuple[Any, ...], value: Any) -> fx.Node:
        for key in path:
            get = getter(root)
            root = get(root, key)
            node = self._create("call_function", get, (node, key), {}, root if root is value else None)
        return node

    def _constant(self, value: torch.Tensor) -> fx.Node:
        if id(value) in self.sandbox.originals or isinstance(value, private.FakeTensor) or self.sandbox.is_new(value):
            raise TraceError(
                f"{self.path or 'the model'}: a tensor {list(value.shape)} comes from code that tracing does not see; "
                "keep the module that makes it whole with leaf_modules",
                source=model_source(),
            )
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = value
        return self._create("get_attr", name, (), {}, value)

    def object(self, value: Any) -> Any:
        """The node of an object; what changed in it since the graph last used it is written down first."""
        tracked = self.objects.get(id(value))
        if tracked is not None:
            self.write_changes(tracked)
            return tracked.node
        if not has_tensor(value) and id(value) in self._shared_objects():
            return value
        template, tensors = self._template(value)
        node = self._create("call_function", rebuild, (template, tensors), {}, None)
        self.objects[id(value)] = Tracked(value, node)
        self.passed.append(self.objects[id(value)])
        return node

    def write_changes(self, tracked: Tracked) -> None:
        """Record what Python code changed in a tracked object that the graph is about to use."""
        self.passed.append(tracked)
        done: list[tuple[Any, ...]] = []
        for path in tracked.changed():
            if any(path[: len(outer)] == outer for outer in done):
                continue  # the outer change brings the new inner object along
            if tracked.node is None:
                raise TraceError(f"{self.path or 'the model'}: the forward changes a list or dict it was given; keep the module whole with leaf_modules")
            part, old = tracked.parts[path]
            new = contents(part) or {}
            content = {key: self.argument(v) for key, v in new.items() if key not in old or old[key] is not v}
            if isinstance(part, list):
                content["len"] = len(part)
            drop = [key for key in old if key not in new]
            self._create("call_function", set_state, (tracked.node, path, content, drop), {}, None)
            done += [(*path, key) for key in content]
        if done:
            tracked.refresh()

    def _template(self, value: Any) -> tuple[Template, list[fx.Node]]:
        memo = _Memo(self)
        copied = replace_tensors(value, memo.slot, memo)
        return Template(copied, memo.slots, memo.kept), memo.values

    def _shared_objects(self) -> dict[int, Any]:
        if self.shared is None:
            self.shared = {id(v): v for module in self.modules.values() for v in vars(module).values()}
        return self.shared

    # -- calls to nodes

    def _create(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta["source"] = model_source()
        node.meta["regions"] = regions.current(self.baseline)
        if isinstance(value, torch.Tensor):
            node.meta["val"] = self.sandbox.fake_of(value)
        if not self.sandbox.fake and op not in ("placeholder", "get_attr"):
            node.meta["dynamic"] = _is_dynamic(node)
        return node

    def parameter(self, name: str, value: Any, is_input: bool) -> None:
        """An argument of the forward: a placeholder, or part of the graph."""
        if is_input:
            node = self._create("placeholder", name, (), {}, value)
            self._bind(node, value)
        if isinstance(value, (list, dict)):
            self.containers[name] = Tracked(value, node if is_input else None)

    def output(self, value: Any) -> None:
        """End the graph."""
        result = self.argument(value)
        for tracked in [*self.objects.values(), *self.containers.values()]:
            self.write_changes(tracked)
        self.graph.output(result)
        for node in reversed(self.graph.nodes):
            if not node.users and (node.op == "get_attr" or node.target in (operator.getitem, getattr) and not node.meta.get("mutates")):
                self.graph.erase_node(node)
        regions.write_regions(self.graph)

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Run a module that stays whole and record the call."""
        self.passed = []
        node_args, node_kwargs = self.argument(args), self.argument(kwargs)
        passed, changed = self.passed, _Changes(args, kwargs)
        out = call()
        node = self._create("call_module", self.paths[id(module)], node_args, node_kwargs, out)
        for tracked in passed:
            tracked.refresh()
        return self._bind(node, out, changed.mark(node))

    def call_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function and record it when it makes or changes a tensor."""
        name = _name(func)
        if name in METADATA and func.__name__ != "__set__":
            if name in SHAPES and not self.sandbox.fake and isinstance(args[0], torch.Tensor):
                self._pin_shape(args[0])
            return func(*args, **kwargs)
        changed = _Changes(args, kwargs)
        if name in ASKS_VALUES and changed.before:
            return self._ask(func, name, args, kwargs)
        out = func(*args, **kwargs)
        if not changed.any() and not has_tensor(out) and func.__name__ != "__set__":
            if changed.before and not self.sandbox.fake:
                return self._ask(func, name, args, kwargs)
            return out
        if isinstance(out, (tuple, list)) and not self.sandbox.fake:
            for tensor, _ in changed.before:
                self._pin_shape(tensor)
        op, target, args = _node_form(func, name, args)
        node = self._create(op, target, self.argument(args), self.argument(kwargs), out)
        mutated = changed.mark(node)
        if target is setitem:
            self._rebind(args[0], node)
            return None
        return self._bind(node, out, mutated)

    def _pin_shape(self, tensor: torch.Tensor) -> None:
        """Python sees a shape that may be another at the next call: the graph is to say so then."""
        node = self.nodes.get(id(tensor))
        if node is not None and node.meta.get("dynamic"):
            node.meta["dynamic"] = False
            self._create("call_function", expect_shape, (node, tuple(tensor.shape)), {}, None)

    def _ask(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a question for a tensor's values, if the answer is the same at every call."""
        node_args = self.argument(args)
        if name == "__bool__" and (decided := chance_decided(node_args[0])) is not None:
            return decided
        values = [self.known.of(arg) if isinstance(arg, fx.Node) else arg for arg in node_args]
        if any(value is None for value in values):
            raise TraceError(
                f"{self.path or 'the model'}: the forward asks for the values of a tensor ({name.strip('_')}), so what it does depends on the data; "
                "keep the module that does it whole with leaf_modules, or avoid the question",
                source=model_source(),
            )
        return func(*values, **kwargs)

    # -- results to values

    def _bind(self, node: fx.Node, value: Any, changed: set[int] = frozenset()) -> Any:  # type: ignore[assignment]
        if isinstance(value, torch.Tensor):
            if id(value) in self.nodes and node.op != "placeholder":
                if id(value) in changed:
                    self._rebind(value, node)
                    return value
                value = value.view_as(value)  # the call gave back what it got: its result is a value of its own
            self._bind_tensor(node, value)
            return value
        if isinstance(value, (dict, list, tuple)):
            parts = {key: self._bind_part(node, key, part, changed) for key, part in (contents(value) or {}).items()}
            return type(value)(parts.values()) if type(value) in (list, tuple) else value
        if not by_reference(value):
            self.objects[id(value)] = Tracked(value, node)
            self.alive.append(value)
        return value

    def _bind_part(self, node: fx.Node, key: Any, part: Any, changed: set[int]) -> Any:
        if by_reference(part):
            return part
        return self._bind(self._create("call_function", operator.getitem, (node, key), {}, part), part, changed)

    def _bind_tensor(self, node: fx.Node, value: torch.Tensor) -> None:
        self.nodes[id(value)] = node
        self.alive.append(value)

    def _rebind(self, value: torch.Tensor, node: fx.Node) -> None:
        node.meta["val"] = self.sandbox.fake_of(value)
        self.nodes[id(value)] = node


class _Memo(dict[int, Any]):
    """The memo of a deep copy that leaves slots for tensors and tracked objects, and keeps what is shared."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.slots: list[Slot] = []
        self.values: list[fx.Node] = []
        self.kept: list[Any] = []

    def get(self, key: int, default: Any = None) -> Any:
        if key not in self:
            tracked = self.recorder.objects.get(key)
            kept = self.recorder.modules.get(key, self.recorder._shared_objects().get(key))
            if tracked is not None:
                self.recorder.write_changes(tracked)
                self[key] = self._slot(tracked.node)
            elif kept is not None and not isinstance(kept, ATOMS):
                self.kept.append(kept)
                self[key] = kept
        return super().get(key, default)

    def slot(self, tensor: torch.Tensor) -> Slot:
        return self._slot(self.recorder.tensor(tensor))

    def _slot(self, node: fx.Node) -> Slot:
        self.slots.append(Slot())
        self.values.append(node)
        return self.slots[-1]


class _Changes:
    """Which tensors among the arguments a call changes in place."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found: list[torch.Tensor] = []
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found += [part for part in value if isinstance(part, torch.Tensor)]
        self.before = [(tensor, private.version(tensor)) for tensor in found]

    def any(self) -> bool:
        return any(private.version(tensor) != before for tensor, before in self.before)

    def mark(self, node: fx.Node) -> set[int]:
        changed = {id(tensor) for tensor, before in self.before if private.version(tensor) != before}
        if changed:
            node.meta["mutates"] = True
        return changed


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return str(func.__self__.__name__)
    return str(name)


def _node_form(func: Any, name: str, args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """The node of a call: fx's own form for operators and methods, so that graphs read like code and can be pickled."""
    kind = getattr(func, "__name__", "")
    if kind == "__get__":
        return "call_function", getattr, (args[0], name)
    if kind == "__set__":
        return "call_function", setattr, (args[0], name, args[1])
    if kind == "__setitem__":
        return "call_function", setitem, args
    if kind in _OPERATORS:
        return "call_function", _OPERATORS[kind], args
    if kind in _REFLECTED:
        return "call_function", _REFLECTED[kind], (args[1], args[0])
    if getattr(torch.Tensor, kind, None) == func:
        return "call_method", kind, args
    return "call_function", func, args
