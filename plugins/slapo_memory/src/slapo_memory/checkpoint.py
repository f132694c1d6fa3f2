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

from .forward_wrappers.recomputation import Checkpointed, is_checkpointed
from .module_lists import listed_in
from .selective_checkpoint.budget import parse, plans
from .selective_checkpoint.policies import contexts_of


class CheckpointPrimitive(Primitive):
    """Keep only the inputs of this module, or of a subgraph in it, for the backward pass, and run it again there.

    Rewrite:
        sch["mlp"].checkpoint():      y = mlp(x)     -->  y = checkpoint(mlp, x)
        sch.checkpoint(match):        y = a(b(x))    -->  y = checkpoint(a . b, x)

    Random states, the tracked ones included, and autocast are as in the forward. So are buffers and attributes of the
    module and those below, with lists, dicts and sets in them: what a forward counts there, it counts once, and random
    generators there, or among the arguments, draw the same. State it keeps elsewhere, in an object of another kind or a
    global, advances again in the recompute; where that changes the result, the first backward raises. A forward that writes
    to an argument in place is refused when it runs. Hooks of the module stay outside, so collectives that ``sync`` puts on
    it run once. Without gradients the forward just runs.

    A subgraph runs where its last operation was. Dropouts between its operations then draw before those in it: their masks
    are other ones than the unmodified model's for the same seed, as random and as independent.

    Args:
        subgraph: One match, or a list of matches, of ``sch.find``, or what that takes. Each becomes a submodule
            ``checkpointed``; modules in it must have no weights, as these would change their names.
        policy: What is kept all the same. None: nothing. ``"matmuls"``: the results of products of matrices, convolutions and
            ``scaled_dot_product_attention``, so that the cheap rest is recomputed. Operators, one
            or a list, as ``torch.ops.aten.mm``, of all overloads or one, or by name, ``"aten.mm"``, which a schedule that is
            to be saved needs. Or a function as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes it.
        ratio: On a list of modules or an ``nn.Sequential``: the share of them that is checkpointed, spread evenly over the
            list; all of a list by default.
        budget: Bytes that each checkpointed module, on a list each of its modules, may keep per call: ``2147483648``,
            ``"2GiB"``, or a share from 0.0, its inputs alone, to 1.0, as much as without a checkpoint. The example inputs are
            run on fake tensors, in train mode, and those operators' outputs are kept that cost most to compute again. They
            are known by which call of their kind they are, so that for other shapes the same are kept, and bytes grow with
            the shapes; a forward that takes another way keeps what has the same numbers there.
        order_args_fn: ``order_args_fn(*args, **kwargs)`` gives the arguments of each call by position. Keyword arguments are
            recomputed as they are, so that none is needed for these. Give an importable function to save the schedule.

    Raises:
        ScheduleError: already checkpointed, or a container that has no forward; a subgraph that holds weights, is gone, or
            cannot be one call; an unknown policy; a ratio outside of 0 to 1, of nothing, or of what is no list; a budget less
            than a module's inputs, beside a policy, or without example inputs.
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
        """The modules, each with its policy, or the matches."""
        try:
            contexts_of(policy)
            allowed = None if budget is None else parse(budget)
        except ValueError as error:
            raise _error(schedule, str(error)) from error
        if order_args_fn is not None and not callable(order_args_fn):
            raise _error(schedule, f"order_args_fn is {order_args_fn!r}; give a function of the forward's arguments")
        if policy is not None and allowed is not None:
            raise _error(schedule, "a budget chooses what is kept; leave the policy out, or the budget")
        if subgraph is None:
            chosen = _chosen(schedule, ratio)
            for each in chosen:
                _check_module(each)
            policies = [policy] * len(chosen) if allowed is None else plans(schedule, chosen, allowed)
            return [*zip(chosen, policies, strict=True)]
        for name, option in (("a ratio", ratio), ("a budget", budget), ("order_args_fn", order_args_fn)):
            if option is not None:
                raise _error(schedule, f"{name} is of modules; leave it out beside a subgraph")
        matches = [list(match) for match in matches_of(schedule, subgraph, "checkpoint")]  # the inputs are the body's
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
            wrap_forward(chosen.mod, Checkpointed(kept, chosen.path))
            if order_args_fn is not None:
                wrap_forward(chosen.mod, partial(_by_position, order_args_fn))
        remake = partial(_body, Checkpointed(policy, schedule.path))
        for match in () if subgraph is None else checked:
            body = remake(graph_edit.traced_module_of(schedule, match), match)
            graph_edit.replace_subgraph(schedule, match, body, name="checkpointed", remake=remake)


def _by_position(order: Callable[..., Sequence[Any]], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*order(*args, **kwargs))


def _body(wrapper: Checkpointed, traced: fx.GraphModule, nodes: Any) -> nn.Module:
    """The nodes as a checkpointed module."""
    body = graph_edit.extract(traced, nodes)
    wrap_forward(body, wrapper)
    return body


def _chosen(schedule: Schedule, ratio: float | None) -> list[Schedule]:
    """This module; of a list the share of its modules, spread evenly."""
    children = listed_in(schedule, opens_sequential=ratio is not None)
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
    return [
        child for index, child in enumerate(children) if (index + 1) * count // len(children) > index * count // len(children)
    ]


def _check_module(schedule: Schedule) -> None:
    mod = schedule.mod
    if is_checkpointed(mod):
        raise _error(schedule, "is checkpointed already; once is enough")
    if type(mod).forward is nn.Module.forward and "forward" not in mod.__dict__:
        raise _error(schedule, f"a {type(mod).__name__} has no forward of its own; checkpoint the modules in it")


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
