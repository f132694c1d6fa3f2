"""Modules that a derived plan leaves whole on every rank, and the warnings that name them."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx, nn

from slapo_core import Schedule, ScheduleError, TraceError, get_logger, paths

from ...rules.parametrizations import parametrization_of
from ...rules.projections import is_projection
from ...rules.rulebook import rules_of
from ...rules.sharding_rule import split_of
from ...splitting import attention_heads
from ...splitting.module_paths import ancestors, without_block_numbers
from ..dry_run.layouts import UNEVEN, Layouts
from ..local_sizes.adapted_modules import is_inside
from .layer_search import Derived
from .replicated_matmuls import whole_products

REMEDY = (
    "layers are split where one makes values of which each rank can have a part until another one takes these in, as in an MLP "
    "or by heads in attention; write it so, give plan={path or glob: style}, or use shard() and sync()"
)


_NONE, _LINE = "none of its layers can be split", re.compile(r"\(\S+:\d+\)")


def without_advice(err: Exception) -> str:
    """Return the sentence of an error of a trace without what ``leaf_modules`` of ``trace()`` would do."""
    return re.sub(r"(;|, or) (trace again|keep)\b[^(]*leaf_modules(, or avoid the question)?", "", str(err))


class Misfit(ScheduleError):
    """A plan that cannot be carried out with these layers split.

    Args:
        schedule: Of the module that is split.
        message: One lower-case sentence.
        layers: Paths of the layers at fault.
    """

    def __init__(self, schedule: Schedule, message: str, layers: Collection[str]) -> None:
        super().__init__(message, path=schedule.path, primitive="tensor_parallel")
        self.layers, self.reason = layers, message


@dataclass
class LeftWhole:
    """Modules that stay whole because a plan that splits them cannot be carried out.

    Args:
        layers: Path of a layer to why it is not split.
        opaque: Path of a module that cannot be traced to why; the layers inside stay whole.
        adapts: Whether whole values may be cut where they meet sharded ones; what meets such values stays whole otherwise.
    """

    layers: dict[str, str] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)
    adapts: bool = True

    def add_layers(self, model: nn.Module, err: Misfit) -> bool:
        """Add the layers at fault with those at the same place in other blocks; return whether there was one to add."""
        kinds = {without_block_numbers(path) for path in err.layers}
        paths = (path for path, _ in [*model.named_modules(), *model.named_parameters()])
        found = {path: err.reason for path in paths if without_block_numbers(path) in kinds and path not in self.layers}
        self.layers.update(found)
        return bool(found)

    def add_opaque(self, schedule: Schedule, err: TraceError) -> bool:
        """Add the module whose forward cannot be traced, and those alike; return whether there is one inside the schedule's."""
        start = f"{schedule.path}." if schedule.path else ""
        path = err.failing_module or ""
        if not path.startswith(start) or not (inside := path.removeprefix(start)):
            return False
        model, rules = schedule.mod, rules_of(schedule)
        alike = [
            other
            for other, _ in model.named_modules()
            if without_block_numbers(other) == without_block_numbers(inside) and other not in self.opaque
        ]
        self.opaque.update(dict.fromkeys(alike, without_advice(err)))
        inner = [(other, model.get_submodule(other)) for other in alike]
        held = [f"{other}.{name}" for other, module in inner for name, _ in module.named_modules() if name]
        self.layers.update({name: without_advice(err) for name in held if rules.is_layer(model.get_submodule(name))})
        return bool(alike)

    def modules(self, model: nn.Module) -> set[nn.Module]:
        """Return the layers themselves."""
        named = dict(model.named_modules())
        return {named[path] for path in self.layers if path in named}


def tell_of_opaque(schedule: Schedule, whole: LeftWhole) -> set[str]:
    """Say that all layers stay whole in modules that cannot be traced and are in no list, and return their paths."""
    told = set[str]()
    for path, reason in whole.opaque.items():
        inside = [schedule.mod.get_submodule(each) for each in whole.layers if is_inside(each, path)]
        full = paths.join(schedule.path, path)
        if without_block_numbers(full) == full and inside and not any(map(split_of, inside)):
            told.add(path)
            _say(schedule, path, reason)
    return told


def remaining_reasons(model: nn.Module, reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons of layers of which the plans of parts have not told.

    Such a plan tells of all layers in the blocks that it splits, but for attentions of which it splits nothing.
    """
    split = {path for path, module in model.named_modules() if split_of(module)}
    blocks, attentions = {_block(path) for path in split}, [*attention_heads.replicated_attentions(model)]
    return {
        path: reason
        for path, reason in reasons.items()
        if path not in split and (_block(path) not in blocks or any(is_inside(path, each) for each in attentions))
    }


def _block(path: str) -> str:
    """Return the path of the outermost repeated module around a layer; the layer's own where there is none."""
    return next((outer for outer in reversed([*ancestors(path)]) if without_block_numbers(outer) != outer), path)


def tell(schedule: Schedule, derived: Derived, misfits: Collection[str] = (), done: Collection[str] = ()) -> None:
    """Say what stays whole: loudly attentions, sizes that do not divide and modules without a split, once for all alike.

    Args:
        schedule: Of what was split.
        derived: The plan.
        misfits: Layers that would have been split if the plan could have been carried out with them.
        done: Paths of modules of which it is said already, or that are split by other means.
    """
    told: set[str] = {*done}
    whole, modules = _whole_modules(derived), dict(schedule.mod.named_modules())
    for path, reason in derived.reasons.items():
        if path in derived.splits or path in derived.parameters or path not in modules:
            continue
        owner, _, child = path.rpartition(".")
        heads = attention_heads.makes_heads(schedule.mod.get_submodule(owner), child)
        uneven = UNEVEN in reason
        where = path if uneven or path not in whole else whole[path]
        what = without_block_numbers(owner if heads else where)
        loud = (heads or where != path or (what != path and (uneven or path in misfits))) and what not in told
        _say(schedule, where if loud else path, reason, loud)
        told.update([what, without_block_numbers(where)] if loud else [])
    for path, line in _of_parameters(schedule, derived).items():
        if not _is_told(path, told):
            told.add(without_block_numbers(path))
            why = next((f": {reason}" for name, reason in derived.reasons.items() if name.startswith(f"{path}.")), f" ({line})")
            why = f"it multiplies by parameters of its own, in no layer{why}"
            _say(schedule, path, why)
    for path, line in _of_convolutions(schedule, derived).items():
        if not _is_told(path, told):
            told.add(without_block_numbers(path))
            _say(schedule, path, f"its MLP is made of convolutions ({line})")
    told |= tell_whole_attentions(schedule, {**_lines_of_calls(derived), **derived.reasons}, _NONE, told)
    computed = {
        without_block_numbers(path): path
        for path, module in schedule.mod.named_modules()
        if parametrization_of(module) and not split_of(module)
    }
    for path in computed.values():
        _say(schedule, path, f"its {parametrization_of(schedule.mod.get_submodule(path))}")
    for path in _whole_projections(schedule):
        if without_block_numbers(path) not in computed and not _is_told(path, told):
            told.add(without_block_numbers(path))
            name = type(schedule.mod.get_submodule(path)).__name__
            why = f"a part of what the {name} returns does not follow from parts of its tensors"
            _say(schedule, path, why)
    for path in _read_weights(schedule, derived):
        rewritten = _is_in_graph(schedule, path)
        if (rewritten or without_block_numbers(path) != path) and not _is_told(path, told):
            why = "the code around it uses its weights and does not call it"
            if rewritten:
                why = "the rewritten graph around it uses its weights; call tensor_parallel() before what rewrites it"
            _say(schedule, path, why)
    split = {outer for path in (*derived.splits, *derived.parameters) for outer in (path, *ancestors(path))}
    for path, line in whole_products(schedule.mod, derived.layouts, split).items():
        if not path or not (_is_told(path, told) or any(is_inside(what, without_block_numbers(path)) for what in told)):
            told |= {without_block_numbers(path)} - {""}
            why = derived.reasons.get(path) or next(_reasons_in(path, derived.reasons), "no rule splits its products")
            _say(schedule, path, why if _LINE.search(why) else f"{why} ({line})")


def tell_of_attributes(schedule: Schedule, layouts: Layouts) -> None:
    """Say which attributes hold a rank's part after a forward, once for all alike."""
    parts = (node for node in layouts.graph.nodes if node in layouts.local)
    names = {without_block_numbers(name): name for node in reversed([*parts]) for name in node.meta.get("assigned", ())}
    what = "tensor_parallel: the attribute %r of %r holds this rank's part of what the unmodified model leaves there"
    for path, _, name in (name.rpartition(".") for name in names.values()):
        get_logger().warning(what, name, paths.join(schedule.path, path), extra=first_rank_only(schedule))


def _is_told(path: str, told: Collection[str]) -> bool:
    return any(is_inside(without_block_numbers(path), what) for what in told)


def _say(schedule: Schedule, path: str, why: str, loud: bool = True) -> None:
    name = paths.join(schedule.path, path) or type(schedule.mod).__name__
    level = logging.WARNING if loud else logging.DEBUG
    get_logger().log(level, "tensor_parallel: %s stays whole on every rank: %s", name, why, extra=first_rank_only(schedule))


def first_rank_only(schedule: Schedule) -> dict[str, bool]:
    """Return what to log with a message that is the same on all ranks: the first of the mesh, or of the group, shows it."""
    is_first = schedule.rank == 0 if schedule.mesh is None else not any(schedule.mesh.get_coordinate() or ())
    return {"another_rank": not is_first}


def _whole_projections(schedule: Schedule) -> Iterable[str]:
    """Return layers with tensors of their own that no rule splits, such as quantised ones, one for all alike."""
    rules, named = rules_of(schedule), dict(schedule.mod.named_modules())
    inside = {other for module in named.values() if split_of(module) for other in module.modules()}
    found = [path for path, module in named.items() if module not in inside and is_projection(module)]
    return {without_block_numbers(path): path for path in reversed(found) if rules.find(named[path]) is None}.values()


def _lines_of_calls(derived: Derived) -> dict[str, str]:
    """Return reasons for attentions that are one call in the graph, as those of torch, with the line that calls them."""
    graph = derived.layouts.graph
    calls = {str(node.target): node for node in graph.find_nodes(op="call_module")}
    return {f"{path}.": f"{_NONE} ({node.meta.get('source')})" for path, node in calls.items()}


def _of_parameters(schedule: Schedule, derived: Derived) -> dict[str, str]:
    """Return modules in which nothing is split, and that use several matrices of their own, to the line that uses the first.

    Repeated ones are meant, and one of a kind; with one matrix it is a table or a router.
    """
    split = {outer for path in (*derived.splits, *derived.parameters) for outer in ancestors(path)}
    found: dict[str, tuple[str, str]] = {}
    for node in derived.layouts.graph.find_nodes(op="get_attr"):
        path = str(node.target).rpartition(".")[0]
        if (
            without_block_numbers(path) == path
            or path in split
            or schedule.mod.get_submodule(path) in derived.layouts.left_whole
        ):
            continue
        own = schedule.mod.get_submodule(path)._parameters.values()
        if sum(each is not None and each.dim() > 1 for each in own) > 1:
            user = next(iter(node.users), node)
            found.setdefault(without_block_numbers(path), (path, str(user.meta.get("source"))))
    return dict(found.values())


def _of_convolutions(schedule: Schedule, derived: Derived) -> dict[str, str]:
    """Return repeated modules in which a convolution widens and one takes the width back, to the line that calls it."""
    kinds, found = (nn.Conv1d, nn.Conv2d), dict[str, tuple[str, str]]()
    wide: dict[str, set[tuple[int, int]]] = {}
    for node in derived.layouts.graph.find_nodes(op="call_module"):
        path, module = str(node.target).rpartition(".")[0], schedule.mod.get_submodule(str(node.target))
        if not isinstance(module, kinds) or module.groups > 1 or without_block_numbers(path) == path or split_of(module):
            continue
        sizes = module.in_channels, module.out_channels
        if sizes[::-1] in wide.get(path, ()) and sizes[0] > sizes[1]:
            found.setdefault(without_block_numbers(path), (path, str(node.meta.get("source"))))
        wide.setdefault(path, set()).add(sizes)
    return dict(found.values())


def _read_weights(schedule: Schedule, derived: Derived) -> Iterable[str]:
    """Return the layers that are not called, but whose weights are used, one for all alike."""
    graph, rules = derived.layouts.graph, rules_of(schedule)
    called = {str(node.target) for node in graph.find_nodes(op="call_module")}
    read = {str(node.target) for node in graph.find_nodes(op="get_attr")} - derived.parameters.keys()
    read = {name.rpartition(".")[0] for name in read} - called
    layers = (path for path in sorted(read, reverse=True) if rules.is_layer(schedule.mod.get_submodule(path)))
    return {without_block_numbers(path): path for path in layers}.values()


def _is_in_graph(schedule: Schedule, path: str) -> bool:
    return any(isinstance(schedule.mod.get_submodule(outer), fx.GraphModule) for outer in ancestors(path))


def _whole_modules(derived: Derived) -> dict[str, str]:
    """Return, of layers in repeated modules, the outermost one around each in which nothing is split, if it has several."""
    split = {outer for path in (*derived.splits, *derived.parameters) for outer in ancestors(path)}
    found: dict[str, str] = {}
    for path in derived.reasons.keys() - derived.splits.keys():
        outer = [other for other in ancestors(path) if other not in split and without_block_numbers(other) != other]
        outer = [other for other in outer if not other.rpartition(".")[2].isdigit()] or outer
        if outer:
            found[path] = outer[-1]
    number = Counter(found.values())
    return {path: owner for path, owner in found.items() if number[owner] > 1}


def tell_whole_attentions(
    schedule: Schedule, reasons: Mapping[str, str], otherwise: str, told: Collection[str] = ()
) -> set[str]:
    """Say of attentions in repeated layers that they stay whole, once for all of a kind; return these kinds.

    Args:
        schedule: Of what was split.
        reasons: Path of a layer to why it stays whole.
        otherwise: Why an attention does that has no such layer.
        told: Kinds of which it is said already.
    """
    kinds = {without_block_numbers(path): path for path in reversed([*attention_heads.replicated_attentions(schedule.mod)])}
    new = {what: path for what, path in kinds.items() if what != path and not any(is_inside(what, other) for other in told)}
    for path in new.values():
        why = next(_reasons_in(path, reasons), otherwise)
        _say(schedule, path, why)
    return set(new)


def _reasons_in(path: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield the reasons of layers inside a module, and of those around it that end with a dot."""
    return (
        reason
        for layer, reason in reasons.items()
        if layer.startswith(f"{path}.") or (layer[-1:] == "." and path.startswith(layer))
    )
