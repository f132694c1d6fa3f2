"""Kernel patterns in traced modules: each search starts at one characteristic operation and follows the data flow."""

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
    """Nodes of a traced module that one call of a kernel can replace."""

    match: Match
    call: KernelCall


class _Nodes(NamedTuple):
    """A candidate: name of the kernel, its inputs in order (nodes or constants), all its nodes, its outputs and its options."""

    kernel: str
    inputs: list[Any]
    inside: list[fx.Node]
    outputs: list[fx.Node]
    options: dict[str, Any]


def find_calls(schedule: Schedule, wanted: Collection[str], choices: dict[str, str]) -> list[FoundCall]:
    """Find calls that the wanted kernels can replace in the traced modules from the schedule's down; none overlap."""
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
                except ScheduleError:  # for example, a value inside is used outside
                    continue
                used.update(nodes.inside)
                found.append(FoundCall(match, call))
    return found


def _attentions(traced: fx.GraphModule) -> Iterator[_Nodes]:
    """``softmax(q @ k.T * scale + mask) @ v``, with a dropout in between, of ``[batch, heads, length, width]``."""
    for softmax in _nodes(traced, "softmax"):
        given = _arguments(softmax)
        scores: Any = given.get("self")
        inside = [softmax]
        masks, scale, mask_is_inverted = list[Any](), 1.0, False
        if not isinstance(scores, fx.Node) or given.get("dim") not in (_LAST, 3) or _dim(softmax) != 4:
            continue
        while _op(scores) == "add" and "alpha" not in _arguments(scores):
            inside.append(scores)
            pair = [_arguments(scores).get("self"), _arguments(scores).get("other")]
            pair.sort(key=lambda each: _op(each) not in ("mul", "div", "matmul", "add"))
            scores = pair[0]
            masks.insert(0, pair[1])
        if not masks and _op(scores) == "masked_fill" and _arguments(scores).get("value") == -math.inf:
            inside.append(scores)
            masks, mask_is_inverted = [_arguments(scores)["mask"]], True
            scores = _arguments(scores)["self"]
        if _op(scores) in ("mul", "div") and isinstance(factor := _arguments(scores).get("other"), (int, float)):
            inside.append(scores)
            scale = scale * factor if _op(scores) == "mul" else scale / factor
            scores = _arguments(scores)["self"]
        keys = _arguments(scores).get("other") if _op(scores) == "matmul" else None
        if not isinstance(keys, fx.Node) or not _swaps_last(keys):
            continue
        inside += [scores, keys]
        dropout, end = 0.0, softmax
        while (user := _only_user(end)) is not None and (_op(user) in _CASTS or _dropout(traced, user) is not None):
            dropout = dropout if _op(user) in _CASTS else _dropout(traced, user) or 0.0
            inside.append(user)
            end = user
        if user is None or _op(user) != "matmul" or _arguments(user).get("self") is not end:
            continue
        inputs = [_arguments(scores)["self"], _arguments(keys)["self"], _arguments(user)["other"], *masks]
        # a mask of another dtype would change the scores' dtype
        added = all(_dtype(mask) in (torch.float32, _dtype(inputs[0])) for mask in masks)
        if not all(isinstance(each, fx.Node) for each in inputs) or not (mask_is_inverted or added):
            continue
        if _dtype(user) == _dtype(inputs[0]):
            options = {"dropout_p": dropout, "scale": float(scale), "mask_is_inverted": mask_is_inverted}
            yield _Nodes("attention", inputs, [*inside, user], [user], options)


def _rms_norms(traced: fx.GraphModule) -> Iterator[_Nodes]:
    """``weight * (x * rsqrt(mean(x ** 2) + eps))``, in single precision, cast back before or after the weight."""
    for rsqrt in _nodes(traced, "rsqrt"):
        chain = _chain(rsqrt, ("add", "mean", "pow"))
        if chain is None:
            continue
        add, mean, power = chain
        eps, wide = _arguments(add).get("other"), _arguments(power).get("self")
        over = {key: value for key, value in _arguments(mean).items() if key != "self"}
        scaled = _only_user(rsqrt)
        whole = over in ({"dim": [_LAST], "keepdim": True}, {"dim": _LAST, "keepdim": True})
        if not whole or type(eps) is not float or _arguments(power).get("exponent") not in (2, 2.0):
            continue
        if not isinstance(wide, fx.Node) or scaled is None or _op(scaled) != "mul":
            continue
        x, inside = wide, [power, mean, add, rsqrt, scaled]
        if _op(wide) in _CASTS and _dtype(wide) == torch.float32 and set(wide.users) <= set(inside):
            inside.append(wide)
            (x,) = wide.all_input_nodes
        if not {x, wide} & set(scaled.all_input_nodes):
            continue
        yield from _weighted_norm(scaled, x, inside, eps)


def _weighted_norm(scaled: fx.Node, x: fx.Node, inside: list[fx.Node], eps: float) -> Iterator[_Nodes]:
    """Match the end of an RMSNorm: a cast and a product with a weight, in either order."""
    value, cast = scaled, "weight"
    if (user := _only_user(value)) is not None and _casts_like(user, x):
        inside, value, cast = [*inside, user], user, "input"
    product = _only_user(value)
    if product is None or _op(product) != "mul" or len(product.all_input_nodes) != 2:
        return
    (weight,) = (each for each in product.all_input_nodes if each is not value)
    inside, offset = [*inside, product], 0.0
    if _op(weight) == "add" and (one := [v for v in _arguments(weight).values() if not isinstance(v, fx.Node)]) in ([1], [1.0]):
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
        nodes, dim = [*before, *inside], _arguments(cos).get("dim")
        unsqueezed = all(_op(each) == "unsqueeze" and set(each.users) <= set(nodes) for each in (cos, sin))
        if unsqueezed and isinstance(dim, int) and _arguments(sin).get("dim") == dim:
            inputs = [query, x, _arguments(cos)["self"], _arguments(sin)["self"]]
            yield _Nodes("rotary", inputs, [*nodes, cos, sin], [first, end], {"unsqueeze_dim": dim})


def _rotation(cat: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node, list[fx.Node]] | None:
    """Match ``x * cos + cat((-x[..., h:], x[..., :h])) * sin`` with this ``cat``: x, the sum, cos, sin, and all nodes."""
    parts, times = _arguments(cat).get("tensors"), _only_user(cat)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or _arguments(cat).get("dim") not in (_LAST, _dim(cat) - 1):
        return None
    minus, front = parts
    if _op(minus) != "neg" or _op(front) != "getitem" or times is None or _op(times) != "mul":
        return None
    back = minus.all_input_nodes[0]
    x = front.args[0]
    half = x.meta["val"].shape[-1] // 2 if isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.Tensor) else 0
    ends = [(Ellipsis, slice(half, None, None)), (Ellipsis, slice(None, half, None))]
    if _op(back) != "getitem" or back.args[0] is not x or _plain_arguments([back.args[1], front.args[1]]) != ends or not half:
        return None
    total = _only_user(times)
    sin = next((each for each in times.all_input_nodes if each is not cat), None)
    if total is None or _op(total) != "add" or "alpha" in _arguments(total) or sin is None:
        return None
    other = next((each for each in total.all_input_nodes if each is not times), None)
    if other is None or _op(other) != "mul" or x not in other.all_input_nodes:
        return None
    cos = next((each for each in other.all_input_nodes if each is not x), None)
    return (x, total, cos, sin, [back, minus, front, cat, times, other, total]) if cos is not None else None


def _plain_arguments(value: Any) -> Any:
    """Return the arguments of a node with traced sizes as integers."""
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


def _dropout_residuals(traced: fx.GraphModule) -> Iterator[_Nodes]:
    """``residual + dropout(x)``."""
    for total in _nodes(traced, "add"):
        for dropped, residual in (
            (total.all_input_nodes, total.all_input_nodes[::-1]) if len(total.all_input_nodes) == 2 else ()
        ):
            p = _dropout(traced, dropped)
            if p is None or len(dropped.users) > 1 or "alpha" in _arguments(total):
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
    "bias_dropout_residual": _dropout_residuals,
}


def _nodes(traced: fx.GraphModule, op: str) -> list[fx.Node]:
    return [node for node in traced.graph.nodes if _op(node) == op]


def _op(node: Any) -> Any:
    plain = isinstance(node, fx.Node) and node.op in ("call_function", "call_method")
    return operator_of(node) if plain else None


def _arguments(node: Any) -> dict[str, Any]:
    """Return the arguments by name, without those equal to their default."""
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
    """Return the chain of first arguments above a node with these operators, each used once; else None."""
    found = []
    for op in ops:
        node = _arguments(node).get("self")  # type: ignore[assignment]
        if _op(node) != op or len(node.users) > 1:
            return None
        found.append(node)
    return found


def _casts_like(node: fx.Node, x: fx.Node) -> bool:
    return _op(node) in _CASTS and _dtype(node) == _dtype(x)


def _swaps_last(node: fx.Node) -> bool:
    dims = {_arguments(node).get("dim0"), _arguments(node).get("dim1")}
    return _op(node) == "transpose" and {dim % 4 for dim in dims if isinstance(dim, int)} == {2, 3}


def _dropout(traced: fx.GraphModule, node: fx.Node) -> float | None:
    """Return the probability of a dropout node, 0 if it is inactive; None for any other node."""
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        if not isinstance(module, nn.Dropout) or type(module) is not nn.Dropout or module.inplace or is_opaque(module):
            return None
        return module.p if module.training else 0.0
    if _op(node) != "dropout" or _arguments(node).get("inplace"):
        return None
    return float(_arguments(node).get("p", 0.5)) if _arguments(node).get("training", True) else 0.0


def _activation(traced: fx.GraphModule, node: fx.Node) -> str | None:
    """Return the name of the activation that a node computes, or None."""
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
    given = _arguments(node) if _op(node) in ("silu", "gelu") else {"inplace": True}
    if given.get("inplace"):
        return None
    return "gelu_tanh" if given.get("approximate") == "tanh" else str(_op(node))


def _draws_between(start: fx.Node, end: fx.Node) -> bool:
    """Return whether a node between ``start`` and ``end`` draws random numbers, or may."""
    node = start.next
    while node is not end:
        if node.meta.get("draws"):
            return True
        node = node.next
    return False
