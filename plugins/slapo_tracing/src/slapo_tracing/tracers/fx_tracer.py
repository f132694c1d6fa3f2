"""``torch.fx``'s symbolic tracer: no example inputs, graphs for every shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx, nn

from slapo_core import TraceError, get_logger

from ..graphs.guard import Call, Guard, argument_values, plain_signature
from ..graphs.traced_module import TracedModule, variants_of
from ..nodes import _torch_private as private
from ..nodes.mode_regions import autocast_state
from ..nodes.nested_values import MODULE_TABLES, difference, fingerprint, is_input
from ..nodes.opaque_modules import is_opaque
from ..recording.attribute_reads import MODULE_ATTRIBUTES, Attributes
from ..recording.module_hooks import share_hooks
from .value_tracer import Plan, trace_again


class SymbolicGuard(Guard):
    """Guard of a symbolic graph: tensors of any shape and dtype as inputs; all other values as in the trace."""

    def problem(self, module: nn.Module, call: Call) -> str | None:
        for name in self.placeholders:
            if not is_input(call.values[name]):
                return f"{name} is {call.values[name]!r}, traced as a tensor"
        for name, traced in self.traced.items():
            if (given := call.given[name]) != traced:
                return difference(traced, given, name)
        changed = self.attributes.find_change(module) if self.attributes is not None else None
        return changed and f"attribute {changed}"


def trace_fx(
    module: nn.Module, example: Any, plan: Plan, concrete_args: Mapping[str, Any], tracer: type[fx.Tracer] = fx.Tracer
) -> TracedModule:
    """Return the graph that ``torch.fx`` makes, with further graphs for the modules that ``plan`` gives their own.

    ``example`` has the arguments of a call; None: any tensors, for arguments without a default. ``concrete_args`` are no
    inputs. Raises ``TraceError`` if the forward treats symbolic values differently from tensors.
    """
    variants = variants_of(module)
    if variants is not None and variants.is_rewritten:
        raise TraceError(f"tracer 'fx' does not go into the rewritten graph of the {variants.label}; use tracer='value'")
    source = variants.before_trace(module, bare=True) if variants is not None else module
    parameters = plain_signature(source)
    concrete, placeholders = _split_arguments(parameters, example, concrete_args)
    graph, reads, inlined = _graph(source, plan, concrete, tracer)
    for node in list(graph.find_nodes(op="placeholder")):
        if str(node.target).removeprefix("*") not in placeholders:
            _erase(graph, node)
    fingerprints = {name: fingerprint(part) for name, part in concrete.items()}
    guard = SymbolicGuard(parameters, module.training, autocast_state(), fingerprints, placeholders)
    names = {id(each): path for path, each in source.named_modules()}
    guard.attributes = Attributes(module, {(names[key], name) for key, name in reads if key in names}, {})
    inner = _trace_submodules(module, graph, plan, tracer)
    traced = TracedModule(module, graph, guard, inner=inner, inlined=inlined, retrace=trace_again)
    if is_opaque(module):
        share_hooks(module, traced)
    return traced


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node and its users: fx checks the value of an argument that is part of the graph."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


def _split_arguments(parameters: Any, example: Any, concrete: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the arguments that are part of the graph, and the names of those that are inputs."""
    if example is None:
        defaults = {name: each.default for name, each in parameters.parameters.items() if each.default is not each.empty}
        values = {**defaults, **concrete}
        named = (name for name, each in parameters.parameters.items() if each.kind is not each.VAR_KEYWORD)
        return values, tuple(name for name in named if name not in values)
    values = argument_values(parameters, *example)
    inputs = tuple(name for name, value in values.items() if is_input(value) and name not in concrete)
    return {name: value for name, value in values.items() if name not in inputs}, inputs


def _graph(
    module: nn.Module, plan: Plan, concrete: dict[str, Any], base: type[fx.Tracer]
) -> tuple[fx.Graph, set[tuple[int, str]], set[str]]:
    """Return the graph, the attributes that were read (module's id and name), and the paths of inlined modules."""
    reads: set[tuple[int, str]] = set()
    inlined: set[str] = set()

    class Tracer(base):  # type: ignore[valid-type, misc]
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            asked = base is not fx.Tracer and super().is_leaf_module(m, module_qualified_name)
            leaf = asked or is_opaque(m) or plan(module_qualified_name, m) != "inline"
            if not leaf:
                inlined.add(module_qualified_name)
            return bool(leaf)

    def read(holder: nn.Module, name: str, value: Any) -> Any:
        # fx itself reads the tables of all
        if name not in MODULE_ATTRIBUTES and (name not in MODULE_TABLES or isinstance(holder, Iterable)):
            reads.add((id(holder), name))
        return value

    def call_through(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    try:
        with private.intercept(call_through, call_through, read, lambda name, answer: answer()):
            return Tracer().trace(module, concrete), reads, inlined
    except Exception as err:  # symbolic values may break any code
        what = f"tracer 'fx' cannot trace {type(module).__name__}: {str(err).splitlines()[0]}"
        raise TraceError(f"{what}; give example_inputs and no tracer, and the forward is run instead") from err


def _trace_submodules(module: nn.Module, graph: fx.Graph, plan: Plan, tracer: type[fx.Tracer]) -> dict[str, nn.Module]:
    made: dict[int, nn.Module] = {}
    found: dict[str, nn.Module] = {}
    for node in graph.find_nodes(op="call_module"):
        path = str(node.target)
        child = module.get_submodule(path)
        if is_opaque(child) or plan(path, child) != "graph":
            continue
        below: Plan = lambda name, inside, path=path: plan(f"{path}.{name}", inside)  # type: ignore[misc]  # noqa: E731
        try:
            made[id(child)] = found[path] = made.get(id(child)) or trace_fx(child, None, below, {}, tracer)
        except TraceError as err:
            get_logger().debug("%s stays whole: %s", path, err)
    return found


def tracer_class(tracer: Any) -> type[fx.Tracer] | None:
    """Return the fx tracer class of a name or class, or None for any other tracer."""
    if isinstance(tracer, type) and issubclass(tracer, fx.Tracer):
        return tracer
    return fx.Tracer if tracer in ("fx", "pytorch") else None
