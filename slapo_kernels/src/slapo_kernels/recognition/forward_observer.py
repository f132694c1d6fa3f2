"""What a forward does, seen as it runs on tensors without numbers: its calls of torch, and the attributes that it goes by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_tracing.nodes import ATOMS, MODULE_TABLES, Snapshot, is_metadata, name_of, tensors_in
from slapo_tracing.recording import MODULE_ATTRIBUTES, PythonRandomState

from ..replacements.meta_copies import bare_copy
from .meta_results import result_of

_NO_SETTINGS = MODULE_ATTRIBUTES | {"training", *MODULE_TABLES}
_DEVICES = ("cpu", "cuda")
_MANY = 10**6
FEW_BATCHES = ((), (_MANY,), (_MANY, 1), (1, 2, 1), (1, 1, 1, 1))
BATCHES = (*FEW_BATCHES, (1,), (7,), (1, 1), (1, _MANY), (_MANY, 2, 3), (2, 3, 1, 2))
"""Shapes of inputs but for the width: few and many, of every number of dimensions."""
USUAL = (2, 3)

Make = Callable[[tuple[int, ...]], Collection[torch.Tensor]]
ELEMENTWISE = frozenset(
    "add radd sub rsub mul rmul div rdiv truediv rtruediv pow rpow square neg reciprocal exp tanh sigmoid erf "
    "silu gelu relu".split()
)
"""Calls that activations may consist of: none that does something else beyond some number."""
_LAYOUT = frozenset("data_ptr is_contiguous is_inference is_leaf requires_grad storage_offset stride".split())
"""What a forward may not go by: it differs between calls of equal shape and dtype."""
HALVES = frozenset("chunk split getitem".split())
NORM = frozenset(
    "add radd sub rsub mul rmul div rdiv truediv rtruediv pow rpow square neg reciprocal sqrt rsqrt to float double type "
    "type_as mean sum var std var_mean norm vector_norm linalg_norm linalg_vector_norm layer_norm rms_norm contiguous".split()
)
"""Calls that norms may consist of."""


class Observed:
    """A bare copy of a module, to run and to watch.

    Args:
        module: Left as it is.
        dtype: Of floating weights; None keeps that of each.
        training: The mode.
        method: What is run.
        whole: Whether parts count as one call each.

    Attributes:
        reads: Path of the part and name of each attribute that runs have asked for.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype | None, training: bool, method: str = "forward", whole: bool = False
    ) -> None:
        self.module = bare_copy(module, dtype, training)
        self.method, self.reads = method, set[tuple[str, str]]()
        self._watch: _Watch | None = None
        self._others = PythonRandomState()
        for _, part in self.module.named_children() if whole else ():
            if type(part) is nn.LayerNorm:
                vars(part)["forward"] = partial(_norm_alone, part)
        for path, part in self.module.named_modules():
            part.__class__ = _listening(type(part), path, self.reads)
        for path, part in self.module.named_children() if whole else ():
            part.register_forward_pre_hook(lambda _, args, kwargs, path=path: self._enter(path, args, kwargs), with_kwargs=True)
            part.register_forward_hook(lambda _part, _args, out: self._leave(out))

    def calls(self, *inputs: torch.Tensor, autocast: bool = True, gradients: bool = True) -> tuple[Any, ...] | None:
        """The calls and their arguments, equal for runs that do the same, and what is returned.

        None where the forward does not run on such inputs, goes by numbers in them or by how they lie in memory, draws random
        numbers but torch's, leaves its module otherwise than it was, turns gradients or autocast off, or has its own backward.
        """
        before = Snapshot({path: vars(part) for path, part in self.module.named_modules()})
        self._watch = _Watch(self.module, inputs)
        try:
            with _autocast(autocast), torch.inference_mode(not gradients), self._watch:
                out = getattr(type(self.module), self.method)(self.module, *inputs)
        except Exception:  # whatever a stranger's forward makes of such inputs
            return None
        finally:
            drawn, changed = self._others.changed(), before.changed()
            if drawn:
                self._others.restore()
            if changed:
                before.restore()
        if drawn or changed or self._watch.modes - {(gradients, autocast, autocast)} or _has_own_backward(out):
            return None
        return *self._watch.calls, self._watch.meaning(out)

    def names(self) -> set[str]:
        """Of all that was called last."""
        return self._watch.names if self._watch is not None else set()

    def dims(self, calls: tuple[Any, ...], make: Make, batches: Collection[tuple[int, ...]]) -> tuple[int, ...]:
        """Numbers of dimensions for which the calls are these, whatever the batch, of inputs made for it."""
        others = {len(batch) for batch in batches if self.calls(*make(batch)) != calls}
        return tuple(size + 1 for size in sorted({len(batch) for batch in batches} - others))

    def _enter(self, path: str, args: Any, kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.note(path, args, kwargs)
            self._watch.depth += 1

    def _leave(self, out: Any) -> Any:
        out = out.view_as(out) if isinstance(out, torch.Tensor) else out  # a dropout that is off returns what it is given
        if self._watch is not None:
            self._watch.depth -= 1
        return out


class Steady(NamedTuple):
    """What a forward does in one dtype, the same in both modes.

    Args:
        calls: On an input of the usual shape.
        dims: Numbers of dimensions of inputs for which it always does that.
        reads: Path of the part and name of each attribute that it goes by.
    """

    calls: tuple[Any, ...]
    dims: tuple[int, ...]
    reads: frozenset[tuple[str, str]]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        dtype: torch.dtype,
        widths: Sequence[int],
        allowed: Collection[str] | None = None,
        method: str = "forward",
        whole: bool = False,
    ) -> Steady | None:
        """Of inputs of these widths; None where it does not run, or is not steady, or does what is not allowed."""
        make, is_first = inputs_of(widths, dtype), dtype is torch.float32
        found: list[Steady] = []
        for training in (True, False):
            observed = Observed(module, dtype, training, method, whole)
            calls = observed.calls(*make(USUAL))
            if calls is None or calls != observed.calls(*make(USUAL), autocast=False):
                return None
            if not training and calls != observed.calls(*make(USUAL), gradients=False):
                return None
            if not (allowed is None or observed.names() <= set(allowed)):
                return None
            if training or is_first:
                dims = observed.dims(calls, make, BATCHES if training and is_first else FEW_BATCHES)
            found.append(cls(calls, dims, frozenset(observed.reads)))
        first, second = found
        steady = (first.calls, first.dims) == (second.calls, second.dims) and len(USUAL) + 1 in first.dims
        return first._replace(reads=first.reads | second.reads) if steady else None


def inputs_of(widths: Sequence[int], dtype: torch.dtype) -> Make:
    """Makes inputs without numbers of these widths, of a batch."""
    return lambda batch: [torch.empty(*batch, width, dtype=dtype, device="meta", requires_grad=True) for width in widths]


class _Watch(TorchFunctionMode):
    """Notes calls, tensors by the order in which they are met."""

    def __init__(self, module: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.names: set[str] = set()
        self.modes: set[tuple[bool, ...]] = set()
        """Whether gradients are on, and autocast on each device."""
        self.depth = 0
        """Of parts that are running and count as one call."""
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
            self.note(name, args, kwargs)
        if _changes(func, name, kwargs) and not self._made.issuperset(map(id, tensors_in(args))):
            raise ValueError("a tensor that was there before is changed")
        out = result_of(func, _bare(name), args, kwargs)
        made = list(tensors_in(out))
        self._alive += made
        self._made.update(map(id, made))
        return out

    def note(self, name: str, args: Any, kwargs: Any) -> None:
        """A call of a function or of a part."""
        self.names.add(_bare(name))
        self.calls.append((name, self.meaning(args), self.meaning(kwargs)))
        self.modes.add((torch.is_grad_enabled(), *map(torch.is_autocast_enabled, _DEVICES)))

    def meaning(self, value: Any) -> Any:
        """Equal for values that are the same in two runs."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._numbers:
                self._numbers[id(value)] = f"value {len(self._numbers)}"
                self._alive.append(value)
            return self._numbers[id(value)]
        if isinstance(value, ATOMS):
            return type(value), value
        if isinstance(value, (list, tuple)):
            return type(value), tuple(map(self.meaning, value))
        if isinstance(value, dict):
            return dict, tuple((key, self.meaning(part)) for key, part in value.items())
        if isinstance(value, slice):
            return slice, tuple(map(self.meaning, (value.start, value.stop, value.step)))
        return type(value), id(value)


def _bare(name: str) -> str:
    return name.strip("_") if name.startswith("__") else name


def _norm_alone(part: nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:
    """What a layer norm returns, but for the numbers: torch computes that in Python, by a dozen operations."""
    if input.shape[-len(part.normalized_shape) :] != torch.Size(part.normalized_shape):
        raise ValueError("an input of another width")
    return input.view_as(input)


def _changes(func: Any, name: str, kwargs: Any) -> bool:
    """Whether a call may change what it is given."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith("__i") or name == "__setitem__" or func.__name__ == "__set__" or "out" in kwargs


@contextmanager
def _autocast(enabled: bool) -> Iterator[None]:
    """On or off on all devices, those that are not here as well; tensors without numbers are not cast."""
    before = [torch.is_autocast_enabled(device) for device in _DEVICES]
    try:
        for device in _DEVICES:
            torch.set_autocast_enabled(device, enabled)
        yield
    finally:
        for device, value in zip(_DEVICES, before, strict=True):
            torch.set_autocast_enabled(device, value)


def _listening(cls: type[nn.Module], path: str, reads: set[tuple[str, str]]) -> type[nn.Module]:
    """A class that notes which attributes are asked for, but for tensors, parts, and those whose getters ask for others."""

    def getattribute(self: Any, name: str) -> Any:
        if name not in _NO_SETTINGS and not name.startswith("_slapo") and not hasattr(getattr(cls, name, None), "__set__"):
            state = object.__getattribute__(self, "__dict__")
            if not any(name in state[table] for table in ("_parameters", "_buffers", "_modules")):
                reads.add((path, name))
        return cls.__getattribute__(self, name)

    made = type(cls.__name__, (cls,), {"__getattribute__": getattribute, "__module__": cls.__module__})
    return made


def _has_own_backward(out: Any) -> bool:
    """Whether a gradient would go through what Python code makes of it."""
    todo = [out.grad_fn] if isinstance(out, torch.Tensor) else []
    for node in todo:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        todo += [each for each, _ in node.next_functions if each is not None] if node is not None else []
    return False
