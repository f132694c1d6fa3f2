"""All private names of torch that tracing uses. A test checks each, and fails when torch moves one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._C import DisableTorchFunction, _EnableTorchFunction
from torch._functorch import apis
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode, _DispatchCacheValidEntry
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from .known_masks import is_indexing_by_positions, with_positions

unrecorded: Callable[[], Any] = DisableTorchFunction
"""Context in which no torch function mode sees calls."""
recorded: Callable[[], Any] = _EnableTorchFunction
"""Context, inside ``unrecorded``, in which the modes see calls again."""
not_compiled: Callable[[Any], Any] = torch._disable_dynamo  # type: ignore[attr-defined]
"""Decorator that keeps ``torch.compile`` off a function and its callees. The first call imports dynamo."""


def in_function_transform() -> bool:
    """Return True while a transform of ``torch.func``, such as ``vmap``, runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_Handler = Callable[..., Any]
_GROUPED = torch.ops.aten._grouped_mm.default
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_COMMUNICATION = ("c10d", "_c10d_functional", "c10d_functional")
_DEVICE = torch.ops.prim.device.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_HASHED = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


MODES = {"is_grad_enabled": torch.is_grad_enabled, "is_inference_mode_enabled": torch.is_inference_mode_enabled}
"""Queries of modes, which no torch function mode sees."""


class UnknownValueError(RuntimeError):
    """Values that are unknown while tracing are written into a tensor of known values."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the operators that draw random numbers."""

    supports_higher_order_operators = True
    drawn = 0
    value_reads = 0
    """Number of operators that read values of real tensors: their result, or its shape, depends on these."""
    shape_reads = 0
    """Number of those among them whose result has a shape that depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count(func)
        return func(*args, **(kwargs or {}))

    def count(self, func: Any) -> None:
        """Count an operator that is about to run."""
        self.drawn += torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


class FakeMode(FakeTensorMode, Watch):  # type: ignore[no-untyped-call]
    """Torch's fake tensor mode with a faster cache: torch's own keys and fake tensors took half of the time of a trace.

    Attributes:
        keeps_values: True to compute with real values what depends on real tensors only.
        most_values: Number of elements from which such a result is fake; None to keep all.
        communicates: False to refuse collectives of real tensors.
        dropped_values: True if a result was fake for its size.
        observer: Called with a function that runs an operator, the operator and its arguments; returns the result. A dispatch
            mode of its own would double the time of the mode.
    """

    keeps_values = False
    most_values: int | None = None
    communicates = True
    dropped_values = False
    observer: Callable[..., Any] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiler runs on fake tensors, and its guard takes as long as the rest of the mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:  # asked more often than all else together
            return args[0].device
        if (observe := self.observer) is None or func.namespace == "prim":
            return self.dispatch(func, types, args, kwargs)
        self.observer = None  # for operators that torch runs to compute a fake
        try:
            return observe(partial(self.dispatch, func, types), func, args, kwargs or {})
        finally:
            self.observer = observe

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on fake tensors."""
        self.count(func)
        if func is _UNSAFE_VIEW:
            func = torch.ops.aten.view.default  # makes the same fake, and is remembered
        if (entry := self._known_result(func, args, kwargs or {})) is not None:
            unused: Any = None  # only of use to entries with symbolic sizes
            return self._output_from_cache_entry(unused, entry, unused, func, args)
        if self.keeps_values and not any(map(_is_valueless, _pytree.tree_leaves((args, kwargs)))):
            if not self.communicates and getattr(func, "namespace", "") in _COMMUNICATION:
                raise UnknownValueError(f"{func} would send values while tracing")
            self._count_reads(func, args)
            large = self._large_result(func, types, args, kwargs or {})
            return func(*args, **(kwargs or {})) if large is None else large
        if self.keeps_values and _changes_values(func, args, kwargs or {}):
            raise UnknownValueError(f"{func} puts values that are unknown while tracing into a tensor of known values")
        if self.keeps_values:
            func, args = with_positions(func, args, has_values)
        if func is _GROUPED and args[0].dtype is not torch.bfloat16:  # torch's own fake takes bfloat16 alone
            return args[0].new_empty(_grouped_shape(*args, **(kwargs or {})))
        return self._fake_result(func, types, args, kwargs)

    def _known_result(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return torch's record of the result of an operator on fake tensors alone, if it ran before."""
        key: list[Any] = []
        if not (self._add_facts(key, args) and self._add_facts(key, kwargs.values())) or FakeTensor not in key:
            return None
        known: dict[Any, Any] = self.cache
        entry = known.get((*self._modes(func), *kwargs, *key))
        return entry if type(entry) is _DispatchCacheValidEntry else None

    def _count_reads(self, func: Any, args: Any) -> None:
        tags = getattr(func, "tags", ())
        if not _VALUE_TAGS.isdisjoint(tags) and not is_indexing_by_positions(func, args):
            self.value_reads += 1
            self.shape_reads += torch.Tag.dynamic_output_shape in tags

    def _fake_result(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        keeps, self.keeps_values = self.keeps_values, False  # tensors that torch makes to compute a fake are fakes
        try:
            return super().dispatch(func, types, args, kwargs)
        finally:
            self.keeps_values = keeps

    def _large_result(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return the fake result of an operator on values if it is too large to be computed, otherwise None."""
        if self.most_values is None or not _may_have_more(func, args, kwargs, self.most_values):
            return None
        found = self._fake_result(func, types, args, kwargs)
        if all(each.numel() <= self.most_values for each in _pytree.tree_leaves(found) if isinstance(each, torch.Tensor)):
            return None
        self.dropped_values = True
        return found

    def fake(self, empty: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a fake tensor on ``device`` for one on meta. All but the first copy the attributes of the first."""
        if device not in self._attributes:
            self._attributes[device] = dict(vars(FakeTensor(self, empty, device)))
        make: Any = torch.Tensor._make_subclass
        fake: torch.Tensor = make(FakeTensor, empty, empty.requires_grad, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(self._attributes[device])
        return fake

    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, key: Any, func: Any, args: Any) -> Any:
        meta = entry.metadata
        if entry.inplace_idx is not None or meta is None or meta.layout is not torch.strided or meta.is_conj or meta.is_neg:
            return super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)
        with torch._C._DisableTorchDispatch():
            if func.is_view:
                storage = args[entry.view_idx].untyped_storage()
                empty = torch.empty(0, dtype=meta.dtype, device="meta")
                empty.set_(storage, meta.storage_offset, meta.shape, meta.stride)
            else:
                empty = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
        return self.fake(empty.requires_grad_(meta.requires_grad), meta.device)

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        key: list[Any] = []
        plain = self._add_facts(key, args) and self._add_facts(key, kwargs.values())
        return (*self._modes(func), *kwargs, *key) if plain else super()._cache_key(state, func, args, kwargs)

    def _validate_cache_key(self, func: Any, args: Any, kwargs: Any) -> None:
        """Let results of functional collectives be remembered, too: torch remembers those of its own operators alone."""
        if func.namespace != "_c10d_functional":
            super()._validate_cache_key(func, args, kwargs)

    def _modes(self, func: Any) -> tuple[Any, ...]:
        return func, torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled()

    def _add_facts(self, key: list[Any], values: Iterable[Any]) -> bool:
        """Append the facts that determine an operator's result; return False for values that need torch's own key."""
        for value in values:
            kind = type(value)
            key.append(kind)
            if kind is FakeTensor and value.fake_mode is self and value.constant is None and value.layout is torch.strided:
                key += (value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes(), value.dtype)
                key += (value.device, value.requires_grad, value.is_inference(), value.is_conj(), value.is_neg())
            elif kind in (list, tuple):
                key.append(len(value))
                if not self._add_facts(key, value):
                    return False
            elif kind in _HASHED:
                key.append(value)
            else:
                return False
        return True


def _grouped_shape(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, *_: Any) -> list[int]:
    """Return the shape of a grouped product: the dimension that ``offs`` groups is not one of batches."""
    rows, columns = left.shape[-2], right.shape[-1]
    if left.dim() == right.dim() == 2:
        return [0 if offs is None else offs.shape[0], rows, columns]
    return [rows, columns] if left.dim() != right.dim() else [left.shape[0], rows, columns]


def _is_valueless(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (isinstance(value, FakeTensor) or value.is_meta)


def _may_have_more(func: Any, args: Any, kwargs: Any, number: int) -> bool:
    """Return False if a new result of an operator surely has no more than so many elements."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable or func.is_view or not _VALUE_TAGS.isdisjoint(func.tags):
        return False
    if torch.Tag.pointwise not in func.tags:
        return True
    shapes = [value.shape for value in _pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    whole: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return whole.numel() > number


def _changes_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if an operator changes a tensor with values in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    given = zip(schema.arguments, [*args, *(kwargs.get(each.name) for each in schema.arguments[len(args) :])], strict=True)
    written = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
    return any(map(has_values, _pytree.tree_leaves(written)))


def has_values(value: Any) -> bool:
    """Return True if the value is a tensor with values, neither fake nor meta."""
    return isinstance(value, torch.Tensor) and not _is_valueless(value)


@contextmanager
def without_observers() -> Iterator[None]:
    """Run a ``with`` block without torch function modes, dispatch modes and hooks for saved tensors, such as a checkpoint's."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]  # type: ignore[no-untyped-call]
    try:
        with _disable_current_modes(), saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)  # type: ignore[no-untyped-call]


def fake_like(mode: FakeMode, tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a fake of ``tensor`` without history, on ``device`` if given, at a sixth of the cost of ``from_tensor``."""
    if (whole := whole_shape(tensor)) is not None:
        empty = torch.empty(whole, dtype=tensor.dtype, device="meta")
        return mode.fake(empty, device or tensor.device).requires_grad_(tensor.requires_grad)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return mode.fake(empty, device or tensor.device).requires_grad_(tensor.requires_grad)


def whole_shape(tensor: torch.Tensor) -> torch.Size | None:
    """Return the full shape of a weight that is partitioned across ranks outside of its use (ZeRO, DTensor); else None."""
    shape: torch.Size | None = getattr(tensor, "ds_shape", None)  # ZeRO's
    distributed = sys.modules.get("torch.distributed.tensor")  # takes half a second to import
    return tensor.shape if shape is None and distributed and isinstance(tensor, distributed.DTensor) else shape


def as_parameter(fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Give ``fake`` the attributes of ``real``, and make it pass for an ``nn.Parameter`` if ``real`` is one."""
    fake.__dict__.update({name: value for name, value in real.__dict__.items() if not name.startswith("ds_")})
    if isinstance(real, nn.Parameter):
        fake._is_param = True
    return fake


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors with the same memory share."""
    return int(tensor.untyped_storage()._cdata)


def version(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor."""
    return 0 if tensor.is_inference() else tensor._version


def memory(tensor: torch.Tensor) -> int:
    """Return a number that is equal for all views of one storage while one of them lives."""
    if tensor.layout is not torch.strided:  # as if indices and values were no views of others
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def leaf_paths(value: Any) -> list[tuple[Any, ...]]:
    """Return the paths of the leaves of nested containers, in the order in which ``torch.export`` numbers them."""
    return [tuple(_key(part) for part in path) for path, _ in _pytree.tree_flatten_with_path(value)[0]]


def _key(part: Any) -> Any:
    return next(getattr(part, name) for name in ("idx", "key", "name") if hasattr(part, name))


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """Return the containers that ``torch.export`` flattened."""
    return _pytree.tree_unflatten(leaves, spec)


def is_recompiled_with_parent() -> bool:
    """Return True if the caller, a ``recompile``, runs because a parent ``GraphModule`` is compiled."""
    return sys._getframe(2).f_code is fx.GraphModule._recompile_submodules.__code__


@contextmanager
def without_fake_tensor_logs() -> Iterator[None]:
    """Run a ``with`` block without the fake tensors' tracebacks of unsupported operators, and without the compiler.

    The compiler cannot run on fake tensors.
    """
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True  # a level would empty the caches of all loggers
    try:
        with eager:
            yield
    finally:
        logger.disabled = before


_tables: dict[str, tuple[Any, dict[str, Any], int, list[str]]] = {}


def _mode_query_tables() -> list[tuple[dict[str, Any], str]]:
    """Return the dicts of modules that import a function of ``MODES``, with its name.

    A search of all modules took a fifth of the time of a trace. Therefore only new and grown modules are searched.
    """
    found = []
    for module_name, module in list(sys.modules.items()):
        known = _tables.get(module_name)
        if known is None or known[0] is not module or len(known[1]) != known[2]:
            table = getattr(module, "__dict__", {})
            known = _tables[module_name] = (module, table, len(table), [name for name in MODES if name in table])
        found += [(known[1], name) for name in known[3] if known[1].get(name) is MODES[name]]
    return found


def modes_inside(mode: TorchFunctionMode) -> tuple[TorchFunctionMode, ...]:
    """Return the torch function modes that were entered after ``mode``, outermost first."""
    stack: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return tuple(stack[stack.index(mode) + 1 :]) if mode in stack else ()


@contextmanager
def intercept_vmap(handler: _Handler) -> Iterator[None]:
    """Redirect calls of functions that ``torch.vmap`` made to ``handler(call, function, ...)``, in a ``with`` block."""
    table = vars(apis)
    plain = table["vmap_impl"]
    table["vmap_impl"] = partial(handler, plain)
    try:
        yield
    finally:
        table["vmap_impl"] = plain


@contextmanager
def intercept(
    module_call: _Handler, apply: _Handler, read: _Handler, ask_mode: _Handler, write: _Handler = lambda module, name: None
) -> Iterator[None]:
    """Redirect calls of modules to ``module_call(call, module, ...)``, and of autograd functions to ``apply(call, ...)``.

    ``read(module, name, value)`` returns the value of each attribute of a module that is read. It is also called for
    parameters, buffers, children and missing attributes, where its result is ignored. Queries in ``MODES`` are redirected to
    ``ask_mode(name, answer)``. ``write(module, name)`` is called after an attribute is set.

    Reentrant checkpoints are not operations of the model: their function runs as if it were called. Autograd functions are
    intercepted below ``Function.apply``, since models keep that method bound, as in ``swish = Swish.apply``.
    """
    plain_call, plain_apply = nn.Module.__call__, vars(_SingleLevelFunction).get("apply")
    plain_setattr = nn.Module.__setattr__
    running: list[Any] = [None]
    plain_getattribute = vars(nn.Module).get("__getattribute__")  # of a trace around this one

    def patched_call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return module_call(plain_call, module, *args, **kwargs)

    def patched_apply(cls: Any, *args: Any) -> Any:
        if issubclass(cls, CheckpointFunction):
            return args[0](*args[2:])
        if running[-1] is cls:
            return (plain_apply.__get__(None, cls) if plain_apply else super(_SingleLevelFunction, cls).apply)(*args)
        running.append(cls)
        try:
            return apply(cls.apply, *args)
        finally:
            running.pop()

    def getattribute(module: nn.Module, name: str) -> Any:
        try:
            value = object.__getattribute__(module, name)
        except AttributeError:
            read(module, name, None)
            raise
        return read(module, name, value)

    def setattribute(module: nn.Module, name: str, value: Any) -> None:
        plain_setattr(module, name, value)
        write(module, name)

    askers = _mode_query_tables()
    for space, name in askers:
        space[name] = partial(ask_mode, name, MODES[name])
    nn.Module.__call__ = patched_call  # type: ignore[method-assign]
    nn.Module.__getattribute__ = getattribute  # type: ignore[method-assign, assignment]
    nn.Module.__setattr__ = setattribute  # type: ignore[method-assign, assignment]
    _SingleLevelFunction.apply = classmethod(patched_apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for space, name in askers:
            space[name] = MODES[name]
        _restore_attribute(nn.Module, "__getattribute__", plain_getattribute)
        nn.Module.__setattr__ = plain_setattr  # type: ignore[method-assign]
        _restore_attribute(_SingleLevelFunction, "apply", plain_apply)
        nn.Module.__call__ = plain_call  # type: ignore[method-assign]


def _restore_attribute(cls: type, name: str, former: Any) -> None:
    """Restore an attribute of a class; None deletes it, since the class had none of its own."""
    delattr(cls, name) if former is None else setattr(cls, name, former)
