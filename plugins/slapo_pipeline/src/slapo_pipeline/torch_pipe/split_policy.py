"""Cuts of a pipe: split points at the paths of modules, or a policy that puts marks into the traced model's graph."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from slapo_core import BuildError
from slapo_tracing.nodes import is_mode_node, is_opaque

from ..assignment.block_inlining import DividedGraph
from ..assignment.node_assignment import Assigner
from ..partition.partitioner import Partitioner
from ..tracing.cuts import Cut, Where, is_mark, pipe_split
from ..tracing.flat_trace import is_custom, trace_flat
from ..tracing.root_hooks import without_root_hooks

if TYPE_CHECKING:
    from ._torch_private import SplitPoint


_POINTS: dict[str, Where] = {"BEGINNING": "before", "END": "after"}
_POINTS_ATTRIBUTE = "_slapo_split_points"
"""Attribute of a module with its split points."""


def annotate_split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Record split points on modules, for ``pipeline`` and ``Pipe.from_tracing``. Forwards do not change.

    Args:
        spec: Paths of modules below it to ``SplitPoint.BEGINNING``, before the module's forward, or ``SplitPoint.END``, after.

    Raises:
        AttributeError: a path names no module; the message has the longest prefix that exists. Nothing was recorded.
        ValueError: a value is not a split point.
    """
    for cut in split_points(mod, spec):
        module = mod.get_submodule(cut)
        module.__dict__[_POINTS_ATTRIBUTE] = tuple(dict.fromkeys([*module.__dict__.get(_POINTS_ATTRIBUTE, ()), cut.where]))


def split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> list[Cut]:
    """Return the cuts of a specification; errors as for ``annotate_split_points``."""
    return [Cut(_check_path(mod, path), _where(path, point)) for path, point in spec.items()]


def annotated_points(mod: nn.Module) -> Iterator[Cut]:
    """Yield the cuts that were recorded on the modules of a model."""
    for path, module in mod.named_modules():
        for where in module.__dict__.get(_POINTS_ATTRIBUTE, ()) if path else ():
            yield Cut(path, where)


def _where(path: str, point: Any) -> Where:
    if getattr(point, "name", None) not in _POINTS or type(point).__name__ != "SplitPoint":
        raise ValueError(f"the split point of {path!r} is {point!r}; give SplitPoint.BEGINNING or SplitPoint.END")
    return _POINTS[point.name]


def _check_path(mod: nn.Module, path: str) -> str:
    names, module, here = path.split("."), mod, ""
    for depth, name in enumerate(names):
        child = module._modules.get(name)
        if child is None:
            last = f"the last part that exists is {here!r}" if here else "no part of it exists"
            missing = ".".join(names[: depth + 1])
            raise AttributeError(f"split point {path!r}: the {type(mod).__name__} has no module {missing!r}; {last}")
        module, here = child, ".".join(names[: depth + 1])
    return path


SplitPolicy = Callable[[fx.GraphModule], fx.GraphModule]


class PolicyPartitioner(Partitioner):
    """Divider of one model at the marks of a policy, for inputs of any shape.

    Args:
        policy: Function that puts calls of ``pipe_split`` into the model's graph and returns it. In the graph every module
            without children is one node.
    """

    def __init__(self, root: nn.Module, policy: SplitPolicy) -> None:
        super().__init__(root, [], None, any_values=True)
        self._policy = policy

    def _cut(self, inputs: Mapping[str, Any]) -> Any:
        with without_root_hooks(self.root):
            flat = trace_flat(self.root, inputs, list(_leaf_paths(self.root, "")), any_values=True)
        marked = self._policy(flat)
        if not isinstance(marked, fx.GraphModule) or not _is_traced(marked.graph):
            raise BuildError(
                f"split_policy returned a {type(marked).__name__} that was not traced here; put pipe_split into the graph "
                "that it is given, and return that"
            )
        positions = _positions(marked.graph)
        return self._program_of_graph(DividedGraph(flat, Assigner(marked.graph, self.root, positions).run()), inputs)


def _leaf_paths(module: nn.Module, path: str) -> Iterator[str]:
    """Yield the paths of the modules that are one node each."""
    for name, child in module._modules.items():
        here = f"{path}.{name}" if path else name
        if child is None:
            continue
        opens = child._modules and (is_custom(child) or isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict)))
        if opens and not is_opaque(child):
            yield from _leaf_paths(child, here)
        else:
            yield here


def _is_traced(graph: fx.Graph) -> bool:
    return all(node.meta for node in graph.nodes if node.op == "call_module")


def _positions(graph: fx.Graph) -> list[int]:
    """Return the positions where stages end, and remove the marks from the graph."""
    positions: list[int] = []
    kept: list[fx.Node] = []
    for node in list(graph.nodes):
        if not _is_split(node):
            kept.append(node)
        else:
            positions.append(len(kept) - 1)
            graph.erase_node(node)
    positions = list(dict.fromkeys(positions))
    for stage, (begin, end) in enumerate(zip([-1, *positions], [*positions, len(kept)], strict=True)):
        between = kept[begin + 1 : end + 1]
        if not any(node.op.startswith("call_") and not is_mode_node(node) for node in between):
            raise BuildError(f"split_policy leaves stage {stage} without anything to run; take a pipe_split out")
    return positions


def _is_split(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if is_mark(node) or node.target is pipe_split:
        return True
    torch_own = sys.modules.get("torch.distributed.pipelining")
    return (
        getattr(node.target, "__name__", "") in ("pipe_split", "_pipe_split", "_pipe_split.default") and torch_own is not None
    )
