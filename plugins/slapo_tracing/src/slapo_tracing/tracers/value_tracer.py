"""The default tracer, which runs the forward once on fake tensors and records it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from slapo_core import TraceError

from ..graphs.guard import Guard
from ..graphs.traced_module import TracedModule
from ..nodes import _torch_private as private
from ..nodes.graph_functions import expect
from ..nodes.nested_values import tensors_in
from ..nodes.opaque_modules import is_opaque
from ..nodes.torch_calls import SHAPES, VALUE_READS
from ..recording.attribute_reads import Attributes
from ..recording.module_hooks import share_hooks, without_engine_hooks
from ..recording.sandbox import Sandbox
from .session import AssignedValues, ByValues, LeafKind, Plan, Request, Session

__all__ = ["AssignedValues", "ByValues", "LeafKind", "Plan", "Request", "trace_again", "trace_value"]

_FEW_VALUES = 2**16
"""Number of elements that a result may always have to be computed with its values."""


def trace_value(
    root: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan,
    target: str = "",
    symbolic: bool = False,
    by_values: ByValues = "never",
    assigned: AssignedValues = "refused",
) -> TracedModule:
    """Return the traced module at ``target``, on its arguments when the root runs on ``args`` and ``kwargs``.

    The root runs on fake tensors. If these do not suffice (a leaf that reads values, an operator without a fake kernel), it
    runs on real ones. Gradients are on, unless the caller has turned them off and the forward queries the mode.
    """
    return _assemble(root, _with_modes(root, args, kwargs, Request(target, plan, symbolic, by_values, assigned)))


def trace_again(
    module: nn.Module, args: Any, kwargs: Any, inlined: frozenset[str], assigned: AssignedValues = "refused"
) -> tuple[fx.Graph, Guard, dict[str, Any]]:
    """Return the graph of a module for another call, with its guard and its constants.

    Args:
        module: The module as it was before it was traced.
        inlined: Paths of the modules whose forwards become part of the graph.
        assigned: As in ``Request``.
    """
    plan: Plan = lambda path, child: "inline" if path in inlined else "leaf"  # noqa: E731
    with without_engine_hooks(module):
        session = _with_modes(module, args, dict(kwargs), Request("", plan, symbolic=True, assigned=assigned))
    recorder, guard = session.graphs[""]
    guard.attributes = Attributes(module, *recorder.attributes(session.filled))
    return recorder.graph, guard, recorder.constants


def _with_modes(root: nn.Module, args: Any, kwargs: Any, request: Request) -> Session:
    session = _attempt(root, args, kwargs, request, grad=True)
    graphs = [recorder.graph for recorder in session.recorders.values()]
    asked = {str(node.args[1]) for graph in graphs for node in graph.find_nodes(op="call_function", target=expect)}
    if not torch.is_grad_enabled() and not asked <= {*VALUE_READS, *SHAPES}:
        session = _attempt(root, args, kwargs, request, grad=False)
    return session


def _attempt(root: nn.Module, args: Any, kwargs: Any, request: Request, *, grad: bool) -> Session:
    sandbox = partial(Sandbox, root, (args, kwargs))
    run = partial(_run, root, args, kwargs, request, grad)
    answers = request.by_values != "never"
    if request.target:  # the target's arguments may depend on values of the inputs
        with suppress(TraceError):
            return run(sandbox(fake=True, keeps_values=True))
    if request.by_values == "first" and (session := _run_by_few_values(run, sandbox, (args, kwargs))) is not None:
        return session
    try:
        return run(sandbox(fake=True))
    except TraceError as err:
        failed = err
    if answers:
        try:
            return run(sandbox(fake=True, keeps_values=True, answers=True))
        except TraceError as err:
            failed = err
    weights = [*root.parameters(), *root.buffers()]
    if failed.__cause__ is None or any(tensor.is_meta or private.whole_shape(tensor) is not None for tensor in weights):
        raise failed
    return run(sandbox(fake=False, answers=answers))


def _run_by_few_values(run: Callable[[Sandbox], Session], make: Callable[..., Sandbox], inputs: Any) -> Session | None:
    """Return a run by the values of inputs and small results, without communication; None if it needs more than that.

    A graph that checks more than answers of yes or no would serve few batches; then there is none, too.
    """
    largest = max((tensor.numel() for tensor in tensors_in(inputs)), default=0)
    for knows_constants in (False, True):
        sandbox = make(fake=True, keeps_values=True, answers=True, knows_constants=knows_constants)
        sandbox.mode.most_values, sandbox.mode.communicates = max(_FEW_VALUES, 4 * largest), False
        with suppress(TraceError):
            session = run(sandbox)
            return session if session.has_only_yes_or_no else None
        if not sandbox.met_constant:
            break
    return None


def _run(root: nn.Module, args: Any, kwargs: Any, request: Request, grad: bool, sandbox: Sandbox) -> Session:
    keeps_values = sandbox.mode.keeps_values
    with sandbox.open(grad):
        session = Session(root, request, sandbox)
        session.run(args, kwargs)
        if sandbox.random_numbers.has_changed():
            what = "the forward draws random numbers from Python or NumPy, which a graph cannot repeat"
            raise TraceError(f"{what}; keep the module that does it whole with leaf_modules")
        target = request.target
        if target not in session.graphs:
            raise TraceError(f"{target!r} is not called when the model runs on the example inputs; trace another module")

        def again() -> Session:
            second = Session(root, request, sandbox, session)
            sandbox.mode.keeps_values = keeps_values
            second.run(args, kwargs)
            return second

        session.check_state(again)
    return session


def _assemble(root: nn.Module, session: Session) -> TracedModule:
    """Return the traced module of the target, assembled from the inside out: each contains the traced modules inside it."""
    made: dict[str, TracedModule] = {}
    for path, (recorder, guard) in sorted(session.graphs.items(), key=lambda item: -len(item[0])):
        prefix = f"{path}." if path else ""
        inner = {name.removeprefix(prefix): module for name, module in made.items() if name.startswith(prefix)}
        module = root.get_submodule(path)
        guard.attributes = Attributes(module, *recorder.attributes(session.filled))
        traced = TracedModule(module, recorder.graph, guard, recorder.constants, inner, recorder.inlined, trace_again)
        if is_opaque(module):
            share_hooks(module, traced)
        made[path] = traced
    return made[session.request.target]
