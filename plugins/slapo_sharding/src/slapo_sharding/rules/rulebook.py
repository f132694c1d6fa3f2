"""Sharding rules of a schedule: those of all plugins of its registry, in order; the rules of this package are last."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from slapo_core import PluginError, Registry, Schedule, default_registry, failure_reason
from slapo_tracing.nodes import as_layer
from slapo_training.model import is_wrapper_subclass

from .channels import channel_dim
from .parametrizations import parametrization_of, restricted_rule
from .projections import projection_rule
from .sharding_rule import Cut, ShardingRule, applied_cut, computes_as, tensor_of


class Rulebook:
    """Ordered rules, of which the first that matches a module applies.

    Args:
        rules: Each rule with its owner, for messages.
        ranks: Number of ranks that modules are split over; numeric probes split into as many parts.
    """

    def __init__(self, rules: Sequence[tuple[ShardingRule, str]], ranks: int) -> None:
        self.rules, self.ranks = rules, max(ranks, 2)

    def find(self, module: nn.Module) -> ShardingRule | None:
        """Return the rule for a module, or None."""
        found = self._first_rule(module)
        return None if found is None else found[0]

    def _first_rule(self, module: nn.Module) -> tuple[ShardingRule, str] | None:
        """Return the first matching rule with its owner; without one, or without a right cut, a numeric probe decides."""
        if any(map(is_wrapper_subclass, module._parameters.values())):
            return None  # a tensor subclass defines itself how it is split
        layer = as_layer(module)
        known = ((rule, owner) for rule, owner in self.rules if _call_rule(rule, owner, rule.matches, layer))
        found = next(((restricted_rule(rule, layer, self.ranks), owner) for rule, owner in known), None)
        if found is None or not found[0].cuts:
            probed = projection_rule(module, self.ranks)
            found = found if probed is None else (probed, "slapo_sharding")
        return found

    def cuts_between(self, module: nn.Module, input: str, output: str) -> Iterator[Cut]:
        """Yield the cuts of a module with these layouts of input and output."""
        rule = self.find(module)
        return (cut for cut in (rule.cuts if rule is not None else ()) if (cut.input, cut.output) == (input, output))

    def layer_cut(self, module: nn.Module, output: str) -> Cut | None:
        """Return the way to split along the width or the channels.

        The output is ``"sharded"`` from a replicated input, ``"partial"`` from a sharded one, or ``"kept"``: both are sharded.
        """
        given = {"sharded": ("replicated", "indices"), "partial": ("sharded",), "kept": ("sharded",)}[output]
        made = "sharded" if output == "kept" else output
        dim = channel_dim(as_layer(module))
        return next((cut for each in given for cut in self.cuts_between(module, each, made) if cut.dim == dim), None)

    def is_layer(self, module: nn.Module, output: str | None = None) -> bool:
        """Return whether a module can be split to this output, see ``layer_cut``; None stands for any output."""
        ways = {"sharded": ("replicated", "sharded"), "partial": ("sharded", "partial"), "kept": ("sharded", "sharded")}
        asked, dim = ways.values() if output is None else [ways[output]], channel_dim(as_layer(module))
        return any(cut.dim == dim for way in asked for cut in self.cuts_between(module, *way))

    def stack_cut(self, module: nn.Module) -> Cut | None:
        """Return the way to split a module with a replicated input and a partial output, such as stacked experts, or None."""
        return next(self.cuts_between(module, "replicated", "partial"), None)

    def is_table(self, module: nn.Module) -> bool:
        """Return whether a module is a lookup table whose width can be split."""
        cut = self.layer_cut(module, "sharded")
        return cut is not None and cut.input == "indices"

    def cut(self, module: nn.Module, name: str, dim: int) -> Cut:
        """Return the cut of ``module`` that splits parameter ``name`` along ``dim``; the applied one if it does.

        Raises:
            LookupError: no rule for such modules, no such cut, or the rule refuses it; its message continues "'name' ...".
        """
        applied = applied_cut(module)
        if applied is not None and applied.cut.dims.get(name) == dim:
            return applied.cut
        if (found := self._first_rule(module)) is not None:
            return _cut(*found, module, name, dim)
        kinds = ", ".join(dict.fromkeys(rule.kind for rule, _ in self.rules))
        raise LookupError(f"is in a {describe_class(module)}, which no sharding rule covers; there are rules for {kinds}")


def describe_class(module: nn.Module) -> str:
    """Return the name of a module's class for errors, with its package if torch has another class of that name.

    Example:
        >>> describe_class(nn.Linear(2, 2))
        'Linear'
    """
    cls = type(module)
    known: type = getattr(nn, cls.__name__, cls)
    kind = cls.__name__ if cls is known else f"{cls.__module__}.{cls.__name__}"
    wrapped = [(name, type(each).__name__) for name, each in module._parameters.items() if is_wrapper_subclass(each)]
    return kind + "".join(f" whose {name!r} is a {each}" for name, each in wrapped[:1])


def _cut(rule: ShardingRule, owner: str, module: nn.Module, name: str, dim: int) -> Cut:
    cut = next((cut for cut in rule.cuts if cut.dims.get(name) == dim), None)
    if cut is None and (computed := next(filter(None, map(parametrization_of, module.modules())), None)):
        raise LookupError(f"cannot be split along {dim}: {computed}, and a part of it does not follow from parts")
    if cut is None:
        held = {*module._parameters, *module._buffers}
        known = sorted({f"{name!r} along {dim}" for cut in rule.cuts for name, dim in cut.dims.items() if name in held})
        raise LookupError(f"of a {rule.kind} cannot be split along {dim}; it can split {', '.join(known)}")
    if why := _call_rule(rule, owner, rule.refuse, module, cut):
        raise LookupError(f"cannot be split along {dim}: {why}")
    if problem := next(_misfits(cut, module), None):
        what = f"sharding rule {rule.kind!r} of {owner} is not for this {type(module).__name__}"
        raise PluginError(f"{what}: {problem}", owner=owner)
    return cut


def _misfits(cut: Cut, module: nn.Module) -> Iterator[str]:
    for name, dim in cut.dims.items():
        tensor = tensor_of(module, name)
        if tensor is not None and dim >= tensor.dim():
            yield f"it splits {name!r} along {dim}, which has {tensor.dim()} dimensions"
    for name in cut.attributes:
        if type(value := getattr(module, name, 1)) is not int:
            yield f"its attribute {name!r} is {value!r}, no number that could be divided"


def _call_rule(rule: ShardingRule, owner: str, question: Callable[..., Any], *args: Any) -> Any:
    try:
        return question(*args)
    except Exception as error:
        raise PluginError(f"sharding rule {rule.kind!r} of {owner} failed: {failure_reason(error)}", owner=owner) from error


_books: WeakKeyDictionary[Registry, dict[int, Rulebook]] = WeakKeyDictionary()


def rules_of(schedule: Schedule) -> Rulebook:
    """Return the rules of the schedule's plugins, loaded on first use.

    Raises:
        PluginError: a plugin's hook fails, or a rule cannot be imported or is not one.
    """
    registry, ranks = schedule.registry, schedule.world_size
    books = _books.setdefault(registry, {})
    if ranks not in books:
        books[ranks] = Rulebook([*reversed(_added.get(registry, {}).values()), *_load(registry)], ranks)
    return books[ranks]


def rule_of(schedule: Schedule) -> ShardingRule | None:
    """Return the rule by which ``shard`` splits the schedule's module, or None without one.

    Args:
        schedule: Handle of the module.

    Raises:
        PluginError: a plugin's hook fails, or a rule cannot be imported or is not one.
    """
    return rules_of(schedule).find(schedule.mod)


_added: WeakKeyDictionary[Registry, dict[type[nn.Module], tuple[ShardingRule, str]]] = WeakKeyDictionary()


def add_rule(registry: Registry, module_cls: type[nn.Module], rule: Any, owner: str) -> None:
    """Add a rule of this process before those of the plugins, the newest first; a class has one such rule.

    Raises:
        PluginError: ``rule`` is not a valid rule.
    """
    _check(rule, owner)
    added = _added.setdefault(registry, {})
    added.pop(module_cls, None)
    added[module_cls] = rule, owner
    _books.pop(registry, None)


def _load(registry: Registry) -> Iterator[tuple[ShardingRule, str]]:
    owners = {id(record.plugin): str(record) for record in registry.records}
    for implementation in reversed(registry.hook.slapo_shard_rules.get_hookimpls()):
        owner = owners[id(implementation.plugin)]
        try:
            given = implementation.function()
        except (Exception, SystemExit) as error:
            raise PluginError(f"slapo_shard_rules of {owner} failed: {failure_reason(error)}", owner=owner) from error
        if not isinstance(given, (list, tuple)):
            raise PluginError(f"slapo_shard_rules of {owner} returned {given!r}; return a list of rules", owner=owner)
        for rule in [rule for entry in given for rule in _import_rules(entry, owner)]:
            _check(rule, owner)
            yield rule, owner


def _check(rule: Any, owner: str) -> None:
    if problem := next(_problems(rule), None):
        label = repr(rule.kind if isinstance(rule, ShardingRule) else rule)
        raise PluginError(f"sharding rule {label} of {owner} cannot be used: {problem}", owner=owner)


def _import_rules(given: Any, owner: str) -> Sequence[Any]:
    try:
        found = pkgutil.resolve_name(given) if isinstance(given, str) else given
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"sharding rule {given!r} of {owner} cannot be imported: {failure_reason(error)}", owner=owner
        ) from error
    return found if isinstance(found, (list, tuple)) else [found]


def _problems(rule: Any) -> Iterator[str]:
    if not isinstance(rule, ShardingRule):
        yield f"{rule!r} is not a ShardingRule"
        return
    yield from _wrong_function("matches", rule.matches, "(module)", 1)
    yield from _wrong_function("refuse", rule.refuse, "(module, cut)", 2)
    if not isinstance(rule.cuts, (list, tuple)) or not rule.cuts or not all(isinstance(cut, Cut) for cut in rule.cuts):
        yield f"cuts is {rule.cuts!r}; give a tuple of Cut"
        return
    for cut in rule.cuts:
        yield from _wrong_cut(cut)


def _wrong_cut(cut: Cut) -> Iterator[str]:
    if not _counts(cut.dims, 0) or not cut.dims:
        yield f"dims is {cut.dims!r}; give each parameter's dimension, counted from 0"
    elif not _counts(cut.parts, 1) or not cut.parts.keys() <= cut.dims.keys():
        yield f"parts is {cut.parts!r}; give a number of blocks for names out of {sorted(cut.dims)}"
    if cut.input not in ("replicated", "sharded", "indices"):
        yield f"input is {cut.input!r}; available: 'replicated', 'sharded', 'indices'"
    if cut.output not in ("sharded", "partial"):
        yield f"output is {cut.output!r}; available: 'sharded', 'partial'"
    if not isinstance(cut.attributes, (list, tuple)) or not all(isinstance(name, str) for name in cut.attributes):
        yield f"attributes is {cut.attributes!r}; give a tuple of names"
    if not isinstance(cut.dim, int):
        yield f"dim is {cut.dim!r}; give a dimension"
    if cut.forward is not None:
        yield from _wrong_function("forward", cut.forward, "(module, input)", 2, takes_more=True)
    if cut.late_bias and (cut.forward is None or cut.output != "partial" or "bias" in cut.dims):
        yield "late_bias goes with a partial output, a whole bias and a forward that leaves it out"


def _counts(given: Any, least: int) -> bool:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        return False
    return all(type(number) is int and number >= least for number in given.values())


def _wrong_function(what: str, given: Any, called: str, arguments: int, takes_more: bool = False) -> Iterator[str]:
    if not callable(given):
        yield f"{what} is {given!r}; give a function {called}"
        return
    try:
        signature = inspect.signature(given)
        (signature.bind_partial if takes_more else signature.bind)(*range(arguments))
    except ValueError:  # a function that is not written in Python may have no signature
        return
    except TypeError:
        yield f"{what} takes {signature}; it is called as {called}"


class ShardMethod:
    """Base class for the ways to split a module class; ``register_shard_method`` registers a subclass.

    Attributes:
        cuts: The ways to split such a module.
    """

    cuts: ClassVar[tuple[Cut, ...]] = ()

    @staticmethod
    def refuse(module: nn.Module, cut: Cut) -> str | None:
        """Say why a cut of this module would be wrong, or None."""
        return None


Method = TypeVar("Method", bound=type[ShardMethod])


def register_shard_method(module_cls: type[nn.Module] | None) -> Callable[[Method], Method]:
    """Return a class decorator that lets ``shard`` split modules of a class in this process.

    The method comes before the rules of plugins. Registering a module class again replaces its method. Subclasses that keep
    the class's forward are split, too.

    Args:
        module_cls: A class of modules; None, for one that could not be imported, registers nothing.

    Raises:
        PluginError: the decorated class is not a valid method.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class Scale(nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.width, self.weight = width, nn.Parameter(torch.ones(width))
        ...     def forward(self, x):
        ...         return x.view(-1, self.width) * self.weight
        >>> @register_shard_method(Scale)
        ... class ShardScale(ShardMethod):
        ...     cuts = (Cut({"weight": 0}, "sharded", "sharded", ("width",)),)
    """

    def register(method: Method) -> Method:
        if module_cls is not None:
            rule: Any = method
            if isinstance(method, type) and issubclass(method, ShardMethod):
                matches = lambda module: computes_as(module, module_cls)  # noqa: E731
                rule = ShardingRule(module_cls.__name__, matches, method.cuts, method.refuse)
            add_rule(default_registry(), module_cls, rule, f"{method.__module__}.{method.__qualname__}")
        return method

    return register
