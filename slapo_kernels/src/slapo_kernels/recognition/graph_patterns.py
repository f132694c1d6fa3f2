"""Kernels in modules that are traced: found from the one operation that gives each away, along the data flow from there."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from slapo_core import Schedule, ScheduleError
from slapo_tracing.editing import graph_edit
from slapo_tracing.matching import Match, bound_arguments, operator_of, signatures_of, traced_modules
from slapo_tracing.nodes import SIZE, is_opaque

from ..replacements.kernel_modules import KernelCall

_LAST = -1
_CASTS = ("to", "type", "type_as", "float")


class FoundCall(NamedTuple):
    """Nodes of a traced module that one call of a kernel can stand for."""

    match: Match
    call: KernelCall


class _Nodes(NamedTuple):
    """A candidate: the kernel, its inputs in order, constants among them, and the nodes of it; the last are its outputs."""

    kernel: str
    inputs: list[Any]
    inside: list[fx.Node]
    outputs: list[fx.Node]
    options: dict[str, Any]


def find_calls(schedule: Schedule, wanted: Collection[str], choices: dict[str, str]) -> list[FoundCall]:
    """Find calls that the wanted kernels can replace in the traced modules from the schedule's down; none overlap.

    Args:
        schedule: Where to look.
        wanted: Names of kernels.
        choices: Kernel to the implementation that is forced.
    """
    found = []
    for path, traced in traced_modules(schedule.mod, schedule.path):
        used: set[fx.Node] = set()
        for kernel, finder in _FINDERS.items():
            for nodes in finder(traced) if kernel in wanted else ():
                if used & set(nodes.inside):
                    continue
                match = Match(path, nodes.inside, nodes.inputs, nodes.outputs)
                call = KernelCall(nodes.kernel, nodes.options, choices.get(nodes.kernel))
                try:
                    graph_edit.check_replace(schedule, match, call)
                except ScheduleError:  # a value inside is used outside, say
                    continue
                used.update(nodes.inside)
                found.append(FoundCall(match, call))
    return found


def _attentions(traced: fx.GraphModule) -> Iterator[_Nodes]:
    """``softmax(q @ k.T * scale + mask) @ v``, with a dropout in between, of ``[batch, heads, length, width]``."""
    for softmax in _nodes(traced, "softmax"):
        given = _given(softmax)
        scores: Any = given.get("self")
        inside = [softmax]
        masks, scale, masks_out = list[Any](), 1.0, False
        if not isinstance(scores, fx.Node) or given.get("dim") not in (_LAST, 3) or _dim(softmax) != 4:
            continue
        while _op(scores) == "add" and "alpha" not in _given(scores):
            inside.append(scores)
            pair = [_given(scores).get("self"), _given(scores).get("other")]
            pair.sort(key=lambda each: _op(each) not in ("mul", "div", "matmul", "add"))
            scores = pair[0]
            masks.insert(0, pair[1])
        if not masks and _op(scores) == "masked_fill" and _given(scores).get("value") == -math.inf:
            inside.append(scores)
            masks, masks_out = [_given(scores)["mask"]], True
            scores = _given(scores)["self"]
        if _op(scores) in ("mul", "div") and isinstance(factor := _given(scores).get("other"), (int, float)):
            inside.append(scores)
            scale = scale * factor if _op(scores) == "mul" else scale / factor
            scores = _given(scores)["self"]
        keys = _given(scores).get("other") if _op(scores) == "matmul" else None
        if not isinstance(keys, fx.Node) or not _swaps_last(keys):
            continue
        inside += [scores, keys]
        dropout, end = 0.0, softmax
        while (user := _only_user(end)) is not None and (_op(user) in _CASTS or _dropout(traced, user) is not None):
            dropout = dropout if _op(user) in _CASTS else _dropout(traced, user) or 0.0
            inside.append(user)
            end = user
        if user is None or _op(user) != "matmul" or _given(user).get("self") is not end:
            continue
        inputs = [_given(scores)["self"], _given(keys)["self"], _given(user)["other"], *masks]
        added = all(_dtype(mask) in (torch.float32, _dtype(inputs[0])) for mask in masks)  # not numbers of other kinds
        if not all(isinstance(each, fx.Node) for each in inputs) or not (masks_out or added):
            continue
        if _dtype(user) == _dtype(inputs[0]):
            options = {"dropout_p": dropout, "scale": float(scale), "masks_out": masks_out}
            yield _Nodes("attention", inputs, [*inside, user], [user], options)


def _rms_norms(traced: fx.GraphModule) -> Iterator[_Nodes]:
    """``weight * (x * rsqrt(mean(x ** 2) + eps))``, in single precision, cast back before or after the weight."""
    for rsqrt in _nodes(traced, "rsqrt"):
        chain = _chain(rsqrt, ("add", "mean", "pow"))
        if chain is None:
            continue
        add, mean, power = chain
        eps, wide = _given(add).get("other"), _given(power).get("self")
        over = {key: value for key, value in _given(mean).items() if key != "self"}
        scaled = _only_user(rsqrt)
        whole = over in ({"dim": [_LAST], "keepdim": True}, {"dim": _LAST, "keepdim": True})
        if not whole or type(eps) is not float or _given(power).get("exponent") not in (2, 2.0):
            continue
        if not isinstance(wide, fx.Node) or scaled is None or _op(scaled) != "mul":
            continue
        x, inside = wide, [power, mean, add, rsqrt, scaled]
        if _op(wide) in _CASTS and _dtype(wide) == torch.float32 and set(wide.users) <= set(inside):
            inside.append(wide)
            (x,) = wide.all_input_nodes
        if not {x, wide} & set(scaled.all_input_nodes):
            continue
        yield from _weighted(scaled, x, inside, eps)


def _weighted(scaled: fx.Node, x: fx.Node, inside: list[fx.Node], eps: float) -> Iterator[_Nodes]:
    """The rest of an RMSNorm: a cast and a product with a weight, in either order."""
    value, cast = scaled, "weight"
    if (user := _only_user(value)) is not None and _casts_like(user, x):
        inside, value, cast = [*inside, user], user, "input"
    product = _only_user(value)
    if product is None or _op(product) != "mul" or len(product.all_input_nodes) != 2:
        return
    (weight,) = (each for each in product.all_input_nodes if each is not value)
    inside, offset = [*inside, product], 0.0
    if _op(weight) == "add" and (one := [v for v in _given(weight).values() if not isinstance(v, fx.Node)]) in ([1], [1.0]):
        inside, offset = [*inside, weight], float(one[0])
        (weight,) = weight.all_input_nodes
    if _op(weight) in _CASTS and len(weight.users) == 1:
        inside.append(weight)
        (weight,) = weight.all_input_nodes
    end = product
    if cast == "weight" and (user := _only_user(product)) is not None and _casts_like(user, x):
        inside, end = [*inside, user], user
    plain = weight.op in ("get_attr", "placeholder") and _dim(weight) == 1
    if plain and _dtype(weight) == _dtype(x) == _dtype(end):
        yield _Nodes("rms_norm", [x, weight], inside, [end], {"eps": eps, "offset": offset, "cast": cast})


def _rotaries(traced: fx.GraphModule) -> Iterator[_Nodes]:
    """Half rotations of queries and keys by the same angles, as in Transformers' ``apply_rotary_pos_emb``."""
    waiting: dict[tuple[fx.Node, fx.Node], tuple[fx.Node, fx.Node, list[fx.Node]]] = {}
    for cat in _nodes(traced, "cat"):
        rotated = _rotation(cat)
        if rotated is None:
            continue
        x, end, cos, sin, inside = rotated
        if (cos, sin) not in waiting:
            waiting[cos, sin] = (x, end, inside)
            continue
        query, first, before = waiting.pop((cos, sin))
        nodes, dim = [*before, *inside], _given(cos).get("dim")
        unsqueezed = all(_op(each) == "unsqueeze" and set(each.users) <= set(nodes) for each in (cos, sin))
        if unsqueezed and isinstance(dim, int) and _given(sin).get("dim") == dim:
            inputs = [query, x, _given(cos)["self"], _given(sin)["self"]]
            yield _Nodes("rotary", inputs, [*nodes, cos, sin], [first, end], {"unsqueeze_dim": dim})


def _rotation(cat: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node, list[fx.Node]] | None:
    """Match ``x * cos + cat((-x[..., h:], x[..., :h])) * sin`` with this ``cat``: x, the sum, cos, sin, and all nodes."""
    parts, times = _given(cat).get("tensors"), _only_user(cat)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or _given(cat).get("dim") not in (_LAST, _dim(cat) - 1):
        return None
    minus, front = parts
    if _op(minus) != "neg" or _op(front) != "getitem" or times is None or _op(times) != "mul":
        return None
    back = minus.all_input_nodes[0]
    x = front.args[0]
    half = x.meta["val"].shape[-1] // 2 if isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.Tensor) else 0
    ends = [(Ellipsis, slice(half, None, None)), (Ellipsis, slice(None, half, None))]
    if _op(back) != "getitem" or back.args[0] is not x or _plain([back.args[1], front.args[1]]) != ends or not half:
        return None
    total = _only_user(times)
    sin = next((each for each in times.all_input_nodes if each is not cat), None)
    if total is None or _op(total) != "add" or "alpha" in _given(total) or sin is None:
        return None
    other = next((each for each in total.all_input_nodes if each is not times), None)
    if other is None or _op(other) != "mul" or x not in other.all_input_nodes:
        return None
    cos = next((each for each in other.all_input_nodes if each is not x), None)
    return (x, total, cos, sin, [back, minus, front, cat, times, other, total]) if cos is not None else None


def _plain(value: Any) -> Any:
    """The arguments of a node with sizes as they were in the trace."""
    return map_arg(value, lambda node: node.meta.get(SIZE, node))


def _gates(kernel: str, traced: fx.GraphModule) -> Iterator[_Nodes]:
    """``act(gate) * up``."""
    for product in _nodes(traced, "mul"):
        if len(product.all_input_nodes) != 2:
            continue
        for act, up in (product.all_input_nodes, product.all_input_nodes[::-1]):
            found = _GATES.get(_activation(traced, act) or "")
            gate = act.all_input_nodes[0] if len(act.all_input_nodes) == 1 else None
            if found and found[0] == kernel and gate is not None and _shape(gate) == _shape(up) == _shape(product):
                if _dtype(gate) == _dtype(up):
                    yield _Nodes(kernel, [gate, up], [act, product], [product], dict(found[1]))
                break


def _dropped_sums(traced: fx.GraphModule) -> Iterator[_Nodes]:
    """``residual + dropout(x)``."""
    for total in _nodes(traced, "add"):
        for dropped, residual in (
            (total.all_input_nodes, total.all_input_nodes[::-1]) if len(total.all_input_nodes) == 2 else ()
        ):
            p = _dropout(traced, dropped)
            if p is None or len(dropped.users) > 1 or "alpha" in _given(total):
                continue
            (x,) = dropped.all_input_nodes
            if _shape(x) == _shape(residual) and _dtype(x) == _dtype(residual) and not _draws_between(dropped, total):
                options = {"p": p, "training": traced.training}
                yield _Nodes("bias_dropout_residual", [x, None, residual], [dropped, total], [total], options)
                break


_GATES: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": ("swiglu", {}),
    "gelu": ("geglu", {"approximate": "none"}),
    "gelu_tanh": ("geglu", {"approximate": "tanh"}),
}
_FINDERS: dict[str, Any] = {
    "attention": _attentions,
    "rms_norm": _rms_norms,
    "rotary": _rotaries,
    "swiglu": lambda traced: _gates("swiglu", traced),
    "geglu": lambda traced: _gates("geglu", traced),
    "bias_dropout_residual": _dropped_sums,
}


def _nodes(traced: fx.GraphModule, op: str) -> list[fx.Node]:
    return [node for node in traced.graph.nodes if _op(node) == op]


def _op(node: Any) -> Any:
    plain = isinstance(node, fx.Node) and node.op in ("call_function", "call_method")
    return operator_of(node) if plain else None


def _given(node: Any) -> dict[str, Any]:
    """Arguments by name; those equal to the default are left out."""
    return bound_arguments(signatures_of(node, None), node.args, node.kwargs)


def _val(node: Any) -> torch.Tensor | None:
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return val if isinstance(val, torch.Tensor) else None


def _dim(node: fx.Node) -> int:
    return -1 if (val := _val(node)) is None else val.dim()


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    return None if (val := _val(node)) is None else tuple(val.shape)


def _dtype(node: fx.Node) -> torch.dtype | None:
    return None if (val := _val(node)) is None else val.dtype


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _chain(node: fx.Node, ops: Collection[str]) -> list[fx.Node] | None:
    """The nodes above, each the first argument of the one below and used by it alone."""
    found = []
    for op in ops:
        node = _given(node).get("self")  # type: ignore[assignment]
        if _op(node) != op or len(node.users) > 1:
            return None
        found.append(node)
    return found


def _casts_like(node: fx.Node, x: fx.Node) -> bool:
    return _op(node) in _CASTS and _dtype(node) == _dtype(x)


def _swaps_last(node: fx.Node) -> bool:
    dims = {_given(node).get("dim0"), _given(node).get("dim1")}
    return _op(node) == "transpose" and {dim % 4 for dim in dims if isinstance(dim, int)} == {2, 3}


def _dropout(traced: fx.GraphModule, node: fx.Node) -> float | None:
    """With what probability a node drops; None of what is no dropout."""
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        if not isinstance(module, nn.Dropout) or type(module) is not nn.Dropout or module.inplace or is_opaque(module):
            return None
        return module.p if module.training else 0.0
    if _op(node) != "dropout" or _given(node).get("inplace"):
        return None
    return float(_given(node).get("p", 0.5)) if _given(node).get("training", True) else 0.0


def _activation(traced: fx.GraphModule, node: fx.Node) -> str | None:
    """Name of the activation that a node computes."""
    if len(node.users) > 1:
        return None
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        if is_opaque(module):
            return None
        if isinstance(module, fx.GraphModule):
            inside = [each for each in module.graph.nodes if each.op not in ("placeholder", "output")]
            return _activation(module, inside[0]) if len(inside) == 1 else None
        if type(module) is nn.GELU:
            return "gelu" if module.approximate == "none" else "gelu_tanh"
        return "silu" if type(module) is nn.SiLU and not module.inplace else None
    given = _given(node) if _op(node) in ("silu", "gelu") else {"inplace": True}
    if given.get("inplace"):
        return None
    return "gelu_tanh" if given.get("approximate") == "tanh" else str(_op(node))


def _draws_between(start: fx.Node, end: fx.Node) -> bool:
    """Return whether something draws random numbers, or may, after ``start`` and before ``end``."""
    node = start.next
    while node is not end:
        if node.meta.get("draws"):
            return True
        node = node.next
    return False
