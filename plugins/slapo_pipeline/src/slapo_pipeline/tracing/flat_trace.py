"""Flat trace of a model, and its cache: modules around a cut are inlined, and all others are one node each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from mmap import mmap
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from slapo_core import ScheduleError, TraceError, named_inputs, split_inputs
from slapo_tracing import trace_module
from slapo_tracing.graphs import TracedModule
from slapo_tracing.nodes import Snapshot, autocast_state, fingerprint, is_mode_node
from slapo_tracing.tracers import ByValues

from ._torch_private import replaced_pipe_split
from .cuts import CUT_AT_MARKS, CUT_PIPELINE_STAGE, cut_where, is_at_mark, is_mark, mark


def trace_flat(
    root: nn.Module,
    inputs: Mapping[str, Any],
    cuts: Sequence[str],
    inlined: Collection[str] = (),
    any_values: bool = False,
) -> TracedModule:
    """Trace the model with the modules around the cuts inlined, and those in ``inlined`` down to modules of ``torch.nn``.

    A model's own modules without parameters, such as rotary tables, are inlined: they often read only the shape of a hidden
    state, and then their result need not cross a boundary. If that trace fails they are one node each. A model that runs on
    real tensors only, as some with experts do, gets zeros for weights on the meta device.

    The forward takes the branches that it takes for the values of these inputs: Transformers makes no mask if nothing is
    padded. With ``any_values`` it takes, where it can, those for values that it does not know.
    """
    by_values: ByValues = "needed" if any_values else "first"
    try:
        return _trace(root, inputs, cuts, inlined, by_values)
    except TraceError:
        if not any(tensor.is_meta for tensor in [*root.parameters(), *root.buffers()]):
            raise
    with _zeros_for_meta(root):
        return _trace(root, inputs, cuts, inlined, by_values)


def _trace(
    root: nn.Module, inputs: Mapping[str, Any], cuts: Sequence[str], inlined: Collection[str], by_values: ByValues
) -> TracedModule:
    parameterless: set[str] = set()
    with replaced_pipe_split(mark):
        try:
            return trace_module(root, inputs, leaf=_leaf(cuts, inlined, parameterless), by_values=by_values)
        except TraceError:
            if not parameterless:
                raise
            return trace_module(root, inputs, leaf=_leaf(cuts, inlined, None), by_values=by_values)


@contextmanager
def _zeros_for_meta(root: nn.Module) -> Iterator[None]:
    """Put real zeros in the place of meta tensors while the context is open."""
    places = [
        (table, name, tensor)
        for module in root.modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None and tensor.is_meta
    ]
    zeros: dict[int, torch.Tensor] = {}
    for table, name, tensor in places:
        if id(tensor) not in zeros:
            value = _zeros(tensor)
            zeros[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        table[name] = zeros[id(tensor)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for table, name, tensor in places:
            table[name] = tensor  # type: ignore[assignment]


def _zeros(like: torch.Tensor) -> torch.Tensor:
    if like.nbytes == 0:
        return torch.zeros(like.shape, dtype=like.dtype)
    # pages that are never written take no memory
    return torch.frombuffer(mmap(-1, like.nbytes), dtype=like.dtype).view(like.shape)


def cut_positions(root: nn.Module, graph: fx.Graph, cuts: Sequence[str]) -> list[tuple[int, str]]:
    """Return the positions in the graph's nodes at which stages end, ascending, each with the path of its cut.

    Args:
        graph: Its flat graph.
        cuts: Paths of modules. A stage ends after the last run of each, or, for a ``Cut``, before the first run or at a mark
            of its forward.

    Raises:
        ScheduleError: a cut module or mark does not run, or nothing runs before the first cut, between two or after the last.
    """
    names = {id(module): name for name, module in root.named_modules()}
    nodes = list(graph.nodes)
    found = sorted((_cut_position(nodes, names[id(root.get_submodule(path))], path), path) for path in cuts)

    kinds = ("call_module", "call_function", "call_method") if any(map(is_at_mark, cuts)) else ("call_module",)
    work = [index for index, node in enumerate(nodes) if node.op in kinds and not is_mark(node) and not is_mode_node(node)]
    _check_work_between(work, found)
    return found


def _cut_position(nodes: Sequence[fx.Node], name: str, cut: str) -> int:
    """Return the index of the last node before a cut at the module ``name``."""
    where = cut_where(cut)
    if isinstance(where, int):
        marks = [index for index, node in enumerate(nodes) if is_mark(node) and _module_path(node) == name]
        if where < len(marks):
            return marks[where]
        many = f"{len(marks)} marks of this module's forward" if marks else "no mark of this module's forward"
        message = f"the model runs into {many} on the example inputs, so there is no mark {where}"
        raise ScheduleError(message, path=cut, primitive=CUT_AT_MARKS)
    skipped = ("placeholder", "get_attr", "output")
    runs = [index for index, node in enumerate(nodes) if node.op not in skipped and _is_inside(_module_path(node), name)]
    if not runs:
        message = (
            "the model does not run this module on the example inputs, or on a micro-batch, as text alone runs no vision part; "
            "cut behind a module that all of them run"
        )
        raise ScheduleError(message, path=cut, primitive=CUT_PIPELINE_STAGE)
    return runs[-1] if where == "after" else runs[0] - 1


def _module_path(node: fx.Node) -> str:
    """Return the path of the module that the node calls, or whose forward recorded the node."""
    return str(node.target if node.op == "call_module" else node.meta.get("module", ""))


def _is_inside(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def inlined_paths(cuts: Iterable[str]) -> set[str]:
    """Return the paths of the modules that a trace for these cuts inlines: those around a cut, and those cut at a mark."""
    parents = {path[:end] for path in cuts for end, letter in enumerate(path) if letter == "."}
    return parents | {path for path in cuts if is_at_mark(path)}


def _leaf(cuts: Sequence[str], inlined: Collection[str], parameterless: set[str] | None) -> Callable[[str, nn.Module], bool]:
    """Return the test for modules that are one node: neither above a cut nor inlined.

    ``parameterless`` receives the paths of inlined modules without parameters; with None these are one node each.
    """
    parents = inlined_paths(cuts)
    ends = set(cuts) - parents

    def leaf(path: str, module: nn.Module) -> bool:
        if path in parents or (is_custom(module) and any(_is_inside(path, name) for name in inlined)):
            return False
        if path in ends or parameterless is None or not is_parameterless(module):
            return True
        parameterless.add(path)
        return False

    return leaf


def is_parameterless(module: nn.Module) -> bool:
    """Return whether a module is the model's own and has no parameters; such modules are inlined without a cut in them."""
    return is_custom(module) and next(module.parameters(), None) is None


def is_custom(module: nn.Module) -> bool:
    """Return whether the module's class is the model's own, rather than one of ``torch.nn``."""
    return not type(module).__module__.startswith("torch.nn.")


def _check_work_between(work: Sequence[int], cuts: Sequence[tuple[int, str]]) -> None:
    begins = [-1, *(position for position, _ in cuts)]
    ends = [*(position for position, _ in cuts), float("inf")]
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if not any(begin < index <= end for index in work):
            where = cuts[max(number - 1, 0)][1]
            what = f"nothing runs between it and {cuts[number][1]!r}" if 0 < number < len(cuts) else "nothing runs after it"
            name = CUT_AT_MARKS if is_at_mark(where) else CUT_PIPELINE_STAGE
            raise ScheduleError(f"{what if number else 'nothing runs before it'}; remove this cut", path=where, primitive=name)


def named_batch(root: nn.Module, inputs: Any) -> dict[str, Any]:
    """Return the arguments of a batch, or of example inputs, by name; see ``slapo_core.modules.forward_arguments``."""
    return named_inputs(root, *split_inputs(inputs))


def unshared_tensors(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with one tensor object per argument: a graph cannot tell two uses of one object apart."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return {name: tree_map_only(torch.Tensor, own, value) for name, value in inputs.items()}


class CachedTrace:
    """A flat trace that is valid until a module, parameter, hook, mode or attribute of the model changes."""

    def __init__(self, root: nn.Module, inputs: Mapping[str, Any], cuts: Iterable[str], flat: TracedModule) -> None:
        self._flat: TracedModule | None = flat
        self._inputs, self._inlined, self._facts = fingerprint(dict(inputs)), inlined_paths(cuts), _model_state(root)
        self._contents = Snapshot([vars(module) for module in root.modules()])

    def pop_if_valid(self, root: nn.Module, inputs: Mapping[str, Any], cuts: Iterable[str]) -> TracedModule | None:
        """Return the trace once; None if it was returned before, or if the model, call or inlined modules differ."""
        flat, self._flat = self._flat, None
        same = (
            self._inlined == inlined_paths(cuts)
            and self._inputs == fingerprint(dict(inputs))
            and self._facts == _model_state(root)
        )
        return flat if same and not self._contents.changed_paths() else None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of the model is traced anew."""


def _model_state(root: nn.Module) -> list[Any]:
    """Return the state that the attributes of modules do not show."""
    tensors = [*root.parameters(), *root.buffers()]
    return [
        (torch.is_grad_enabled(), autocast_state()),
        [type(module) for module in root.modules()],
        [(tensor.requires_grad, tensor.shape, tensor.dtype, tensor.device) for tensor in tensors],
    ]
