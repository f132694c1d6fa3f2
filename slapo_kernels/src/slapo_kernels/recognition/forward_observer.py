"""Observation of a forward on meta tensors: its calls of torch, and the attributes that it reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from slapo_tracing.nodes import ATOMS, MODULE_TABLES, Snapshot, is_metadata, name_of, tensors_in
from slapo_tracing.recording import MODULE_ATTRIBUTES, PythonRandomState

from ..replacements.meta_copies import meta_copy

_NO_SETTINGS = MODULE_ATTRIBUTES | {"training", *MODULE_TABLES}
_DEVICES = ("cpu", "cuda")
_MANY = 10**6
FEW_BATCHES = ((), (_MANY,), (_MANY, 1), (1, 2, 1), (1, 1, 1, 1))
BATCHES = (*FEW_BATCHES, (1,), (7,), (1, 1), (1, _MANY), (_MANY, 2, 3), (2, 3, 1, 2))
"""Batch shapes of inputs, without the width: small and large, with every number of dimensions."""
TYPICAL_BATCH = (2, 3)

Make = Callable[[tuple[int, ...]], Collection[torch.Tensor]]
ELEMENTWISE = frozenset(
    "add radd sub rsub mul rmul div rdiv truediv rtruediv pow rpow square neg reciprocal exp tanh sigmoid erf "
    "silu gelu relu".split()
)
"""Calls that activations may consist of: none of them has a threshold that a probe could miss."""
_LAYOUT = frozenset("data_ptr is_contiguous is_inference is_leaf requires_grad storage_offset stride".split())
"""Properties that a forward may not read, as they differ between calls of equal shape and dtype."""
HALVES = frozenset("chunk split getitem".split())
NORM = frozenset(
    "add radd sub rsub mul rmul div rdiv truediv rtruediv pow rpow square neg reciprocal sqrt rsqrt to float double type "
    "type_as mean sum var std var_mean norm vector_norm linalg_norm linalg_vector_norm layer_norm rms_norm contiguous".split()
)
"""Calls that norms may consist of."""


class ForwardObserver:
    """A meta copy of a module that records the calls of its runs.

    Args:
        module: The module; it does not change.
        dtype: Dtype of floating weights; None keeps the dtype of each.
        training: Mode of the copy.
        method: Name of the method that runs.
        whole: Whether children count as one call each.

    Attributes:
        reads: Path of the submodule and name of each attribute that runs have read.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype | None, training: bool, method: str = "forward", whole: bool = False
    ) -> None:
        self.module = meta_copy(module, dtype, training)
        self.method, self.reads = method, set[tuple[str, str]]()
        self._recorder: _CallRecorder | None = None
        self._others = PythonRandomState()
        for _, part in self.module.named_children() if whole else ():
            if type(part) is nn.LayerNorm:
                vars(part)["forward"] = partial(_layer_norm_shape, part)
        for path, part in self.module.named_modules():
            part.__class__ = _recording_class(type(part), path, self.reads)
        for path, part in self.module.named_children() if whole else ():
            part.register_forward_pre_hook(lambda _, args, kwargs, path=path: self._enter(path, args, kwargs), with_kwargs=True)
            part.register_forward_hook(lambda _part, _args, out: self._leave(out))

    def calls(self, *inputs: torch.Tensor, autocast: bool = True, gradients: bool = True) -> tuple[Any, ...] | None:
        """Return the calls with their arguments, and the result, in a form that is equal for equal runs.

        Return None if the forward does not run on such inputs, reads their values or memory layout, draws random numbers other
        than torch's, changes its module, switches gradients or autocast off, or has a backward of its own.
        """
        before = Snapshot({path: vars(part) for path, part in self.module.named_modules()})
        self._recorder = _CallRecorder(self.module, inputs)
        try:
            with _autocast(autocast), torch.inference_mode(not gradients), self._recorder:
                out = getattr(type(self.module), self.method)(self.module, *inputs)
        except Exception:  # a stranger's forward may raise anything
            return None
        finally:
            drawn, changed = self._others.has_changed(), before.changed_paths()
            if drawn:
                self._others.restore()
            if changed:
                before.restore()
        if drawn or changed or self._recorder.modes - {(gradients, autocast, autocast)} or _has_own_backward(out):
            return None
        return *self._recorder.calls, self._recorder.key(out)

    def names(self) -> set[str]:
        """Return the names of all functions called in the last run."""
        return self._recorder.names if self._recorder is not None else set()

    def dims(self, calls: tuple[Any, ...], make: Make, batches: Collection[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the numbers of input dimensions for which the calls are these, for each of the batches."""
        others = {len(batch) for batch in batches if self.calls(*make(batch)) != calls}
        return tuple(size + 1 for size in sorted({len(batch) for batch in batches} - others))

    def _enter(self, path: str, args: Any, kwargs: Any) -> None:
        if self._recorder is not None:
            self._recorder.record(path, args, kwargs)
            self._recorder.depth += 1

    def _leave(self, out: Any) -> Any:
        if isinstance(out, torch.Tensor):  # an inactive dropout returns its input; a view makes the result another tensor
            out = out.view_as(out)
        if self._recorder is not None:
            self._recorder.depth -= 1
        return out


class StableCalls(NamedTuple):
    """The calls of a forward in one dtype, equal in both modes.

    Args:
        calls: Calls on inputs of the typical batch shape.
        dims: Numbers of input dimensions for which the calls are the same.
        reads: Path of the submodule and name of each attribute that the forward reads.
    """

    calls: tuple[Any, ...]
    dims: tuple[int, ...]
    reads: frozenset[tuple[str, str]]

    @classmethod
    def observe(
        cls,
        module: nn.Module,
        dtype: torch.dtype,
        widths: Sequence[int],
        allowed: Collection[str] | None = None,
        method: str = "forward",
        whole: bool = False,
    ) -> StableCalls | None:
        """Observe a forward on inputs of these widths. Return None if it fails, is not stable, or makes another call."""
        make, is_first = inputs_of(widths, dtype), dtype is torch.float32
        found: list[StableCalls] = []
        for training in (True, False):
            observed = ForwardObserver(module, dtype, training, method, whole)
            calls = observed.calls(*make(TYPICAL_BATCH))
            if calls is None or calls != observed.calls(*make(TYPICAL_BATCH), autocast=False):
                return None
            if not training and calls != observed.calls(*make(TYPICAL_BATCH), gradients=False):
                return None
            if not (allowed is None or observed.names() <= set(allowed)):
                return None
            if training or is_first:
                dims = observed.dims(calls, make, BATCHES if training and is_first else FEW_BATCHES)
            found.append(cls(calls, dims, frozenset(observed.reads)))
        first, second = found
        stable = (first.calls, first.dims) == (second.calls, second.dims) and len(TYPICAL_BATCH) + 1 in first.dims
        return first._replace(reads=first.reads | second.reads) if stable else None


def inputs_of(widths: Sequence[int], dtype: torch.dtype) -> Make:
    """Return a function from a batch shape to meta inputs of these widths."""
    return lambda batch: [torch.empty(*batch, width, dtype=dtype, device="meta", requires_grad=True) for width in widths]


def tensor_inputs(module: nn.Module, method: str = "forward") -> tuple[str, ...] | None:
    """Return the names of a method's arguments if it has some, all positional and required; else None."""
    try:
        parameters = list(inspect.signature(getattr(type(module), method)).parameters.values())[1:]
    except (AttributeError, TypeError, ValueError):
        return None
    plain = all(each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty for each in parameters)
    return tuple(each.name for each in parameters) if parameters and plain else None


class _CallRecorder(TorchFunctionMode):
    """Torch function mode that records calls; tensors are numbered in the order in which they appear."""

    def __init__(self, module: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.names: set[str] = set()
        self.modes: set[tuple[bool, ...]] = set()
        """Combinations of grad mode and autocast per device during the calls."""
        self.depth = 0
        """Number of running children that count as one call; calls inside them are not recorded."""
        self._numbers = {id(tensor): name for name, tensor in module.named_parameters(remove_duplicate=False)}
        self._numbers.update({id(tensor): str(place) for place, tensor in enumerate(inputs)})
        self._alive: list[torch.Tensor] = []
        self._made: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if is_metadata(func, name):
            if name in _LAYOUT:
                raise ValueError(f"{name} is asked for")
            return func(*args, **kwargs)
        if not self.depth:
            self.record(name, args, kwargs)
        if _is_in_place(func, name, kwargs) and not self._made.issuperset(map(id, tensors_in(args))):
            raise ValueError("a tensor that was there before is changed")
        out = result_of(func, _without_underscores(name), args, kwargs)
        made = list(tensors_in(out))
        self._alive += made
        self._made.update(map(id, made))
        return out

    def record(self, name: str, args: Any, kwargs: Any) -> None:
        self.names.add(_without_underscores(name))
        self.calls.append((name, self.key(args), self.key(kwargs)))
        self.modes.add((torch.is_grad_enabled(), *map(torch.is_autocast_enabled, _DEVICES)))

    def key(self, value: Any) -> Any:
        """Return a key that is equal for the same value in two runs."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._numbers:
                self._numbers[id(value)] = f"value {len(self._numbers)}"
                self._alive.append(value)
            return self._numbers[id(value)]
        if isinstance(value, ATOMS):
            return type(value), value
        if isinstance(value, (list, tuple)):
            return type(value), tuple(map(self.key, value))
        if isinstance(value, dict):
            return dict, tuple((key, self.key(part)) for key, part in value.items())
        if isinstance(value, slice):
            return slice, tuple(map(self.key, (value.start, value.stop, value.step)))
        return type(value), id(value)


def _without_underscores(name: str) -> str:
    return name.strip("_") if name.startswith("__") else name


def _layer_norm_shape(part: nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:
    """Return a tensor like a layer norm's result: torch's meta function runs a dozen operations in Python."""
    if input.shape[-len(part.normalized_shape) :] != torch.Size(part.normalized_shape):
        raise ValueError("an input of another width")
    return input.view_as(input)


def _is_in_place(func: Any, name: str, kwargs: Any) -> bool:
    """Return whether a call may change an argument in place."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith("__i") or name == "__setitem__" or func.__name__ == "__set__" or "out" in kwargs


@contextmanager
def _autocast(enabled: bool) -> Iterator[None]:
    """Switch autocast on or off for all device types, including absent ones; meta tensors are never cast."""
    before = [torch.is_autocast_enabled(device) for device in _DEVICES]
    try:
        for device in _DEVICES:
            torch.set_autocast_enabled(device, enabled)
        yield
    finally:
        for device, value in zip(_DEVICES, before, strict=True):
            torch.set_autocast_enabled(device, value)


def _recording_class(cls: type[nn.Module], path: str, reads: set[tuple[str, str]]) -> type[nn.Module]:
    """Return a subclass that records reads of attributes, except tensors, children, and properties, which read others."""

    def getattribute(self: Any, name: str) -> Any:
        if name not in _NO_SETTINGS and not name.startswith("_slapo") and not hasattr(getattr(cls, name, None), "__set__"):
            state = object.__getattribute__(self, "__dict__")
            if not any(name in state[table] for table in ("_parameters", "_buffers", "_modules")):
                reads.add((path, name))
        return cls.__getattribute__(self, name)

    return type(cls.__name__, (cls,), {"__getattribute__": getattribute, "__module__": cls.__module__})


def _has_own_backward(out: Any) -> bool:
    """Return whether the autograd graph has a node of a Python ``autograd.Function``."""
    todo = [out.grad_fn] if isinstance(out, torch.Tensor) else []
    for node in todo:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        todo += [each for each, _ in node.next_functions if each is not None] if node is not None else []
    return False


_OF_ONE = frozenset(("gelu", "relu", "square"))
_OF_TWO = frozenset("add radd sub rsub mul rmul div rdiv truediv rtruediv pow".split())
_NORMS = (F.layer_norm, F.rms_norm)


def result_of(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a tensor of the call's shape, dtype and autograd inputs, by functions whose meta kernel is in C++.

    For others torch runs dozens of operations in Python.
    """
    if args and _is_plain(args[0]):
        if _is_like_silu(func, name, args, kwargs):
            return F.silu(args[0])
        if name in _OF_TWO and len(args) == 2 and not kwargs and _is_plain(args[1]) and args[0].dtype is args[1].dtype:
            return torch.lerp(args[0], args[1], 0.5)
    return func(*args, **kwargs)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta and value.is_floating_point()


def _is_like_silu(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _OF_ONE:
        plain = not kwargs.get("inplace") and kwargs.get("approximate", "none") in ("none", "tanh")
        return len(args) == 1 and plain and kwargs.keys() <= {"inplace", "approximate"}
    if name in _OF_TWO:
        return len(args) == 2 and type(args[1]) in (int, float) and not kwargs
    if func not in _NORMS or len(args) != 2 or not kwargs.keys() <= {"weight", "bias", "eps"}:
        return False
    x, shape = args[0], tuple(args[1])
    return tuple(x.shape[-len(shape) :]) == shape and all(_fits(kwargs.get(each), x, shape) for each in ("weight", "bias"))


def _fits(weight: Any, x: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a weight is None, or a leaf that a norm over ``shape`` takes without a cast."""
    if weight is None:
        return True
    return _is_plain(weight) and weight.grad_fn is None and tuple(weight.shape) == shape and weight.dtype is x.dtype
