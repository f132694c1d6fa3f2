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
from ..dry_run.layout_records import NOT_DIVISIBLE
from ..dry_run.layouts import Layouts
from ..dry_run.node_values import calls_by_path
from ..local_sizes.adapted_modules import is_inside
from .layer_search import DerivedPlan
from .replicated_matmuls import replicated_matmuls

REMEDY = (
    "layers are split in pairs, a column-parallel one whose sharded output reaches a row-parallel one, as in an MLP or by "
    "heads in attention; write it so, give plan={path or glob: style}, or use shard() and sync()"
)


_NO_LAYER, _SOURCE_LINE = "none of its layers can be split", re.compile(r"\(\S+:\d+\)")


def without_trace_advice(err: Exception) -> str:
    """Return the message of a tracing error without advice on ``leaf_modules``, an argument of ``trace()`` alone."""
    return re.sub(r"(;|, or) (trace again|keep)\b[^(]*leaf_modules(, or avoid the question)?", "", str(err))


def plan_error(schedule: Schedule, message: str) -> ScheduleError:
    """Return the error of a plan that cannot be derived or applied, from one lower-case sentence."""
    return ScheduleError(message, path=schedule.path, primitive="tensor_parallel")


class PlanConflict(ScheduleError):
    """Error of a plan that is not feasible while the layers at the paths ``layers`` are split."""

    def __init__(self, schedule: Schedule, message: str, layers: Collection[str]) -> None:
        super().__init__(message, path=schedule.path, primitive="tensor_parallel")
        self.layers, self.reason = layers, message


@dataclass
class ReplicatedModules:
    """Modules that stay whole because a plan that splits them is not feasible.

    Args:
        layers: Path of each layer, to the reason.
        opaque: Path of each module that cannot be traced, to the reason. The layers inside stay whole.
        adapts: Whether whole values may be cut where they meet sharded ones. If not, layers whose outputs meet whole values
            stay whole.
    """

    layers: dict[str, str] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)
    adapts: bool = True

    def add(self, schedule: Schedule, err: Exception) -> bool:
        """Add what made a plan infeasible; return whether there is anything new."""
        if isinstance(err, PlanConflict):
            return self._add_layers(schedule.mod, err)
        return isinstance(err, TraceError) and self._add_opaque(schedule, err)

    def _add_layers(self, model: nn.Module, err: PlanConflict) -> bool:
        """Add the layers at fault and those at the same position in other blocks; return whether any is new."""
        kinds = {without_block_numbers(path) for path in err.layers}
        paths = (path for path, _ in [*model.named_modules(), *model.named_parameters()])
        found = {path: err.reason for path in paths if without_block_numbers(path) in kinds and path not in self.layers}
        self.layers.update(found)
        return bool(found)

    def _add_opaque(self, schedule: Schedule, err: TraceError) -> bool:
        """Add the module that cannot be traced and those like it; return whether it lies inside the module to split."""
        start = f"{schedule.path}." if schedule.path else ""
        path = err.failing_module or ""
        if not path.startswith(start) or not (inside := path.removeprefix(start)):
            return False
        model, rules, kind = schedule.mod, rules_of(schedule), without_block_numbers(inside)
        others = (other for other, _ in model.named_modules() if other not in self.opaque)
        alike = [other for other in others if without_block_numbers(other) == kind]
        self.opaque.update(dict.fromkeys(alike, without_trace_advice(err)))
        inner = [(other, model.get_submodule(other)) for other in alike]
        held = [f"{other}.{name}" for other, module in inner for name, _ in module.named_modules() if name]
        self.layers.update({name: without_trace_advice(err) for name in held if rules.is_layer(model.get_submodule(name))})
        return bool(alike)

    def modules(self, model: nn.Module) -> set[nn.Module]:
        """Return the modules at the paths of ``layers``."""
        named = dict(model.named_modules())
        return {named[path] for path in self.layers if path in named}


def log_opaque(schedule: Schedule, replicated: ReplicatedModules) -> set[str]:
    """Log the untraceable modules outside of lists whose layers all stay whole, and return their paths."""
    logged = set[str]()
    for path, reason in replicated.opaque.items():
        inside = [schedule.mod.get_submodule(each) for each in replicated.layers if is_inside(each, path)]
        full = paths.join(schedule.path, path)
        if without_block_numbers(full) == full and inside and not any(map(split_of, inside)):
            logged.add(path)
            _log(schedule, path, reason)
    return logged


def remaining_reasons(model: nn.Module, reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons of layers that the plans of submodules have not logged.

    Such a plan logs all layers in the blocks that it splits, except for an attention that stays whole.
    """
    split = {path for path, module in model.named_modules() if split_of(module)}
    blocks, attentions = {_block(path) for path in split}, [*attention_heads.replicated_attentions(model)]
    unlogged = {path for path in reasons if _block(path) not in blocks or any(is_inside(path, each) for each in attentions)}
    return {path: reason for path, reason in reasons.items() if path in unlogged - split}


def _block(path: str) -> str:
    """Return the path of the outermost repeated module around a layer, or the path of the layer."""
    return next((outer for outer in reversed([*ancestors(path)]) if without_block_numbers(outer) != outer), path)


def log_replicated(schedule: Schedule, derived: DerivedPlan, conflicts: Collection[str], done: Collection[str]) -> None:
    """Log what stays whole, once for identical modules.

    Attentions, sizes that are not divisible, and modules without any split are warnings. ``conflicts`` are the layers that stay
    whole because a plan that splits them was not feasible; ``done`` was logged before, or is split by other means.
    """
    logged: set[str] = {*done}
    whole, modules = _outermost_replicated(derived), dict(schedule.mod.named_modules())
    for path, reason in derived.reasons.items():
        if path in derived.splits or path in derived.parameters or path not in modules:
            continue
        owner, _, child = path.rpartition(".")
        heads = attention_heads.makes_heads(schedule.mod.get_submodule(owner), child)
        indivisible = NOT_DIVISIBLE in reason
        where = path if indivisible or path not in whole else whole[path]
        what = without_block_numbers(owner if heads else where)
        is_warning = (heads or where != path or (what != path and (indivisible or path in conflicts))) and what not in logged
        _log(schedule, where if is_warning else path, reason, is_warning)
        logged.update([what, without_block_numbers(where)] if is_warning else [])

    def log_once(path: str, why: str) -> None:
        if not _is_logged(path, logged):
            logged.add(without_block_numbers(path))
            _log(schedule, path, why)

    for path, line in _modules_with_matrices(schedule, derived).items():
        why = next((f": {reason}" for name, reason in derived.reasons.items() if name.startswith(f"{path}.")), f" ({line})")
        log_once(path, f"it multiplies by its own parameters, outside of any layer{why}")
    for path, line in _convolutional_mlps(schedule, derived).items():
        log_once(path, f"its MLP is made of convolutions ({line})")
    # attentions that are one call in the graph, such as those of torch, with the line of the call
    calls = calls_by_path(derived.layouts.graph).items()
    lines = {f"{path}.": f"{_NO_LAYER} ({nodes[-1].meta.get('source')})" for path, nodes in calls}
    logged |= log_replicated_attentions(schedule, lines | derived.reasons, _NO_LAYER, logged)
    whole_ones = [path for path, module in modules.items() if parametrization_of(module) and not split_of(module)]
    computed = {without_block_numbers(path): path for path in whole_ones}
    for path in computed.values():
        _log(schedule, path, f"its {parametrization_of(schedule.mod.get_submodule(path))}")
    for path in _replicated_projections(schedule):
        if without_block_numbers(path) not in computed:
            name = type(schedule.mod.get_submodule(path)).__name__
            log_once(path, f"a shard of the output of the {name} does not follow from shards of its tensors")
    for path in _uncalled_layers(schedule, derived):
        rewritten = any(isinstance(schedule.mod.get_submodule(outer), fx.GraphModule) for outer in ancestors(path))
        if (rewritten or without_block_numbers(path) != path) and not _is_logged(path, logged):
            why = "the code around it uses its weights without calling it"
            if rewritten:
                why = "the rewritten graph around it uses its weights; call tensor_parallel() before what rewrites it"
            _log(schedule, path, why)
    split = {outer for path in (*derived.splits, *derived.parameters) for outer in (path, *ancestors(path))}
    for path, line in replicated_matmuls(schedule.mod, derived.layouts, split).items():
        if not path or not (_is_logged(path, logged) or any(is_inside(what, without_block_numbers(path)) for what in logged)):
            logged |= {without_block_numbers(path)} - {""}
            why = derived.reasons.get(path) or next(_reasons_in(path, derived.reasons), "no rule splits its products")
            _log(schedule, path, why if _SOURCE_LINE.search(why) else f"{why} ({line})")


def log_sharded_attributes(schedule: Schedule, layouts: Layouts) -> None:
    """Log the attributes that hold a shard after a forward, once for identical modules."""
    parts = (node for node in layouts.graph.nodes if node in layouts.local_shapes)
    names = {without_block_numbers(name): name for node in reversed([*parts]) for name in node.meta.get("assigned", ())}
    what = "tensor_parallel: the attribute %r of %r holds this rank's shard of the value that the unmodified model stores"
    for path, _, name in (name.rpartition(".") for name in names.values()):
        get_logger().warning(what, name, paths.join(schedule.path, path), extra=first_rank_only(schedule))


def _is_logged(path: str, logged: Collection[str]) -> bool:
    return any(is_inside(without_block_numbers(path), what) for what in logged)


def _log(schedule: Schedule, path: str, why: str, is_warning: bool = True) -> None:
    name = paths.join(schedule.path, path) or type(schedule.mod).__name__
    level = logging.WARNING if is_warning else logging.DEBUG
    get_logger().log(level, "tensor_parallel: %s stays whole on every rank: %s", name, why, extra=first_rank_only(schedule))


def first_rank_only(schedule: Schedule) -> dict[str, bool]:
    """Return the ``extra`` of a log message that is equal on all ranks: the first of the mesh, or group, shows it."""
    is_first = schedule.rank == 0 if schedule.mesh is None else not any(schedule.mesh.get_coordinate() or ())
    return {"another_rank": not is_first}


def _replicated_projections(schedule: Schedule) -> Iterable[str]:
    """Return layers with own tensors that no rule splits, such as quantized ones; identical ones once."""
    rules, named = rules_of(schedule), dict(schedule.mod.named_modules())
    inside = {other for module in named.values() if split_of(module) for other in module.modules()}
    found = [path for path, module in named.items() if module not in inside and is_projection(module)]
    return {without_block_numbers(path): path for path in reversed(found) if rules.find(named[path]) is None}.values()


def _modules_with_matrices(schedule: Schedule, derived: DerivedPlan) -> dict[str, str]:
    """Return modules with several matrices and nothing split, to the line that uses the first matrix.

    Only repeated modules count, and identical ones once. A module with one matrix is a table or a router.
    """
    split = {outer for path in (*derived.splits, *derived.parameters) for outer in ancestors(path)}
    found: dict[str, tuple[str, str]] = {}
    for node in derived.layouts.graph.find_nodes(op="get_attr"):
        path = str(node.target).rpartition(".")[0]
        module = schedule.mod.get_submodule(path)
        if without_block_numbers(path) == path or path in split or module in derived.layouts.replicated_modules:
            continue
        if sum(each is not None and each.dim() > 1 for each in module._parameters.values()) > 1:
            user = next(iter(node.users), node)
            found.setdefault(without_block_numbers(path), (path, str(user.meta.get("source"))))
    return dict(found.values())


def _convolutional_mlps(schedule: Schedule, derived: DerivedPlan) -> dict[str, str]:
    """Return repeated modules with a convolution that widens and one that narrows again, to the line of the second call."""
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


def _uncalled_layers(schedule: Schedule, derived: DerivedPlan) -> Iterable[str]:
    """Return the layers whose weights are used without a call of the layer, identical ones once."""
    graph, rules = derived.layouts.graph, rules_of(schedule)
    read = {str(node.target) for node in graph.find_nodes(op="get_attr")} - derived.parameters.keys()
    read = {name.rpartition(".")[0] for name in read} - calls_by_path(graph).keys()
    layers = (path for path in sorted(read, reverse=True) if rules.is_layer(schedule.mod.get_submodule(path)))
    return {without_block_numbers(path): path for path in layers}.values()


def _outermost_replicated(derived: DerivedPlan) -> dict[str, str]:
    """Return the outermost repeated module without a split around each layer, if it has several such layers."""
    split = {outer for path in (*derived.splits, *derived.parameters) for outer in ancestors(path)}
    found: dict[str, str] = {}
    for path in derived.reasons.keys() - derived.splits.keys():
        outer = [other for other in ancestors(path) if other not in split and without_block_numbers(other) != other]
        outer = [other for other in outer if not other.rpartition(".")[2].isdigit()] or outer
        if outer:
            found[path] = outer[-1]
    number = Counter(found.values())
    return {path: owner for path, owner in found.items() if number[owner] > 1}


def log_replicated_attentions(
    schedule: Schedule, reasons: Mapping[str, str], otherwise: str, logged: Collection[str] = ()
) -> set[str]:
    """Log the repeated attentions that stay whole, once for each kind, and return these kinds.

    The reason is that of a layer inside, ``otherwise`` if no layer has one. Kinds in ``logged`` are left out.
    """
    kinds = {without_block_numbers(path): path for path in reversed([*attention_heads.replicated_attentions(schedule.mod)])}
    new = {what: path for what, path in kinds.items() if what != path and not any(is_inside(what, other) for other in logged)}
    for path in new.values():
        _log(schedule, path, next(_reasons_in(path, reasons), otherwise))
    return set(new)


def _reasons_in(path: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield the reasons of the layers inside a module, and of paths around it that end with a dot."""
    for layer, reason in reasons.items():
        if layer.startswith(f"{path}.") or (layer[-1:] == "." and path.startswith(layer)):
            yield reason
