"""``sch.checkpoint()``: recompute activations in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx, nn

from slapo_core import Primitive, Schedule, ScheduleError
from slapo_tracing.editing import graph_edit, resolve_nodes
from slapo_tracing.matching import matches_of
from slapo_tracing.nodes import wrap_forward

from .forward_wrappers.recomputation import CheckpointWrapper, is_checkpointed
from .module_lists import check_module, modules_of_list
from .selective_checkpoint.budget import call_policies, parse_budget
from .selective_checkpoint.kept_outputs import contexts_of


class CheckpointPrimitive(Primitive):
    """Save only the inputs of this module, or of a subgraph in it, and recompute the forward in the backward pass.

    Rewrite:
        sch["mlp"].checkpoint():      y = mlp(x)     -->  y = checkpoint(mlp, x)
        sch.checkpoint(match):        y = a(b(x))    -->  y = checkpoint(a . b, x)

    The recomputation restores random states, including the tracked ones, and autocast. It also restores buffers and attributes
    of the module and its submodules, with the lists, dicts and sets in them: a counter advances once, and random generators
    found there or among the arguments draw the same numbers. State elsewhere, in other objects or globals, advances again; if
    that changes the result, the first backward raises. A forward that writes to an argument in place is refused when it runs.
    Hooks of the module stay outside, so collectives of ``sync`` run once. Without gradients the wrapper has no effect.

    A subgraph runs at the position of its last operation. Dropouts between its operations then draw before those inside it,
    so their masks differ from the unmodified model's for the same seed.

    Args:
        subgraph: One match or a list of matches of ``sch.find``, or an argument of it. Each becomes a submodule
            ``checkpointed``; modules in it must have no weights, whose names would change.
        policy: The outputs to keep. None: none. ``"matmuls"``: outputs of matrix products, convolutions and
            ``scaled_dot_product_attention``, so that only cheap operators are recomputed. Operators, one or a list, such as
            ``torch.ops.aten.mm``, with all overloads or one; or their names, ``"aten.mm"``, if the schedule is to be saved.
            Or a policy function of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
        ratio: On a module list or an ``nn.Sequential``: the share of members that is checkpointed, spread evenly; all members
            of a list by default.
        budget: Bytes that each checkpointed module (on a list, each member) may keep per call: ``2147483648``, ``"2GiB"``, or
            a share from 0.0, the inputs alone, to 1.0, as much as without a checkpoint. The model runs once on fake example
            inputs in train mode, and the operators with the most expensive outputs are kept. They are identified by the index
            of their call, so other shapes keep the same outputs with other bytes; a forward that takes another branch keeps
            the outputs with the same indices.
        order_args_fn: ``order_args_fn(*args, **kwargs)`` returns the positional arguments of each call. Keyword arguments work
            without it. Give an importable function if the schedule is to be saved.

    Raises:
        ScheduleError: already checkpointed, or a container that has no forward; a subgraph that holds weights, is gone, or
            cannot be one call; an unknown policy; a ratio outside 0 to 1, of no member, or on a module that is not a list; a
            budget below a module's inputs, together with a policy, or without example inputs.
    """

    name = "checkpoint"
    scope = "module"

    @staticmethod
    def check(
        schedule: Schedule,
        subgraph: Any = None,
        *,
        policy: Any = None,
        ratio: float | None = None,
        budget: Any = None,
        order_args_fn: Callable[..., Sequence[Any]] | None = None,
    ) -> list[Any]:
        """Return the modules with their policies, or the matches."""
        try:
            contexts_of(policy)
            allowed = None if budget is None else parse_budget(budget)
        except ValueError as error:
            raise _error(schedule, str(error)) from error
        if order_args_fn is not None and not callable(order_args_fn):
            raise _error(schedule, f"order_args_fn is {order_args_fn!r}; give a function of the forward's arguments")
        if policy is not None and allowed is not None:
            raise _error(schedule, "a budget chooses what is kept; leave the policy out, or the budget")
        if subgraph is None:
            chosen = _chosen(schedule, ratio)
            for each in chosen:
                check_module(each, "checkpoint", is_checkpointed(each.mod))
            policies = [policy] * len(chosen) if allowed is None else call_policies(schedule, chosen, allowed)
            return [*zip(chosen, policies, strict=True)]
        for name, option in (("a ratio", ratio), ("a budget", budget), ("order_args_fn", order_args_fn)):
            if option is not None:
                raise _error(schedule, f"{name} is of modules; leave it out beside a subgraph")
        # as lists: the inputs of a match are not part of it
        matches = [list(match) for match in matches_of(schedule, subgraph, "checkpoint")]
        for match in matches:
            _check_subgraph(schedule, match)
        return matches

    @staticmethod
    def apply(
        schedule: Schedule,
        subgraph: Any = None,
        *,
        policy: Any = None,
        ratio: float | None = None,
        budget: Any = None,
        order_args_fn: Callable[..., Sequence[Any]] | None = None,
        checked: list[Any],
    ) -> None:
        for chosen, kept in checked if subgraph is None else ():
            schedule.touch(chosen.mod)
            wrap_forward(chosen.mod, CheckpointWrapper(kept, chosen.path))
            if order_args_fn is not None:
                wrap_forward(chosen.mod, partial(_by_position, order_args_fn))
        remake = partial(_body, CheckpointWrapper(policy, schedule.path))
        for match in () if subgraph is None else checked:
            body = remake(graph_edit.traced_module_of(schedule, match), match)
            graph_edit.replace_subgraph(schedule, match, body, name="checkpointed", remake=remake)


def _by_position(order: Callable[..., Sequence[Any]], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*order(*args, **kwargs))


def _body(wrapper: CheckpointWrapper, traced: fx.GraphModule, nodes: Any) -> nn.Module:
    """Return the nodes as a checkpointed module."""
    body = graph_edit.extract(traced, nodes)
    wrap_forward(body, wrapper)
    return body


def _chosen(schedule: Schedule, ratio: float | None) -> list[Schedule]:
    """Return this module, or the share of a list's members, spread evenly."""
    children = modules_of_list(schedule, opens_sequential=ratio is not None)
    if children is None:
        if ratio is not None:
            raise _error(schedule, f"a ratio is of a list of modules, and this is a {type(schedule.mod).__name__}")
        return [schedule]
    if not children:
        raise _error(schedule, "the list is empty; there is nothing to checkpoint")
    if ratio is None:
        ratio = 1.0
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise _error(schedule, f"ratio is {ratio!r}; give a share above 0, up to 1")
    count = round(ratio * len(children))
    if not count:
        raise _error(schedule, f"a ratio of {ratio} is none of {len(children)} modules; give a larger one, or leave it out")
    total = len(children)
    return [child for index, child in enumerate(children) if (index + 1) * count // total > index * count // total]


def _check_subgraph(schedule: Schedule, match: list[tuple[str, fx.Node]]) -> None:
    traced = graph_edit.traced_module_of(schedule, match)
    for node in resolve_nodes(traced, match):
        if node.op != "call_module":
            continue
        module = traced.get_submodule(str(node.target))
        if is_checkpointed(module):
            raise _error(schedule, f"{node.target!r} in the subgraph is checkpointed already; once is enough")
        if module.state_dict():
            advice = "checkpoint a module that contains it, or a subgraph of operations"
            raise _error(schedule, f"the weights of {node.target!r} in the subgraph would change their names; {advice}")
    graph_edit.check_replace(schedule, match, lambda *inputs: inputs)


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, path=schedule.path, primitive="checkpoint")
