"""Checks of a sharding rule: a layer with the rule, on several ranks, beside the unmodified layer."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from slapo_core import Registry, Schedule, ScheduleError, build, create_schedule, default_registry, split_inputs
from slapo_verify.comparison import assert_equivalent

from ..workers.pool import MAX_WORKERS
from .checks import Check, on_ranks, run_all
from .examples.case import ConformanceError, check_sentence
from .examples.examples import Refused, RuleExample
from .examples.model_snapshot import Snapshot, first_difference, first_of, structure
from .examples.validation import check_examples_list

if TYPE_CHECKING:
    from slapo_sharding import Cut, ShardingRule

_PLUGINS = ("slapo_tracing.plugin", "slapo_training.plugin", "slapo_sharding.plugin")


def sharding_rule_checks(kind: str, examples: Iterable[RuleExample]) -> list[Check]:
    """Return the checks of a sharding rule, for ``pytest.mark.parametrize``.

    For each ``Cut``, outputs, input gradients and the gradient of every parameter are compared with those of the unmodified
    layer.

    Args:
        kind: ``ShardingRule.kind`` of the rule.
        examples: Layers that it splits: at least one.
    """
    found = check_examples_list("sharding rule", kind, examples, RuleExample)
    checks = [Check(kind, "registered", None, partial(_check_registration, kind, found))]
    for case in [RuleCase(kind, example) for example in found]:
        cuts = {(cut.main_parameter(case.layer()), cut.dims[cut.main_parameter(case.layer())]): cut for cut in case.cuts()}
        for (name, dim), cut in cuts.items():
            for what, ranks in case.checks(cut, name).items():
                run = partial(on_ranks, _check_split, ranks, case.author, case, what, name, dim)
                checks.append(Check(kind, f"{what} {name!r} along {dim}, {ranks} ranks", case.example, run))
        run = partial(on_ranks, _check_refusals, case.example.ranks, case.author, case)
        checks.append(Check(kind, "refusals", case.example, run))
    return checks


def check_sharding_rule(kind: str, examples: Iterable[RuleExample]) -> None:
    """Check a sharding rule, as ``sharding_rule_checks`` does.

    Raises:
        ConformanceError: one sentence for each check that failed.
    """
    run_all(sharding_rule_checks(kind, examples))


@dataclass(frozen=True)
class RuleCase:
    """An example of a sharding rule in one process.

    Args:
        kind: Name of the rule.
        example: The example.
    """

    kind: str
    example: RuleExample

    @property
    def author(self) -> Callable[..., Any]:
        """Function whose file other processes have to load."""
        function = self.example.inputs if callable(self.example.inputs) else self.example.layer
        return getattr(function, "func", function)  # of a partial

    def layer(self) -> nn.Module:
        """Return a new layer, with the same numbers each time."""
        torch.manual_seed(0)
        return self.example.layer()

    def schedule(self, layer: nn.Module | None = None) -> Schedule:
        """Return the top schedule, whose module is the layer."""
        names = (*_PLUGINS, *self.example.plugins)
        registry = Registry(map(importlib.import_module, names)) if self.example.plugins else default_registry()
        return create_schedule(self.layer() if layer is None else layer, plugins=registry)

    def rule(self) -> ShardingRule | None:
        """Return the rule that ``shard`` takes for the layer."""
        from slapo_sharding.rules import rule_of  # noqa: PLC0415  installed where sharding rules are written

        return rule_of(self.schedule())

    def cuts(self) -> tuple[Cut, ...]:
        """Return the ways to split the layer, but for those that the example says are refused."""
        rule, layer = self.rule(), self.layer()
        refused = [tuple(each.args)[:2] for each in self.example.refused if not callable(each.args)]
        return tuple(
            cut
            for cut in (rule.cuts if rule else ())
            if (cut.main_parameter(layer), cut.dims[cut.main_parameter(layer)]) not in refused
        )

    def cut(self, name: str, dim: int) -> Cut:
        """Return the cut that splits a parameter along a dimension."""
        rule = self.rule()
        assert rule is not None
        return next(each for each in rule.cuts if each.dims.get(name) == dim)

    def checks(self, cut: Cut, name: str) -> dict[str, int]:
        """Return the checks of one cut, and the number of ranks of each."""
        found = {"split": self.example.ranks, "meta": self.example.ranks}
        tensors = dict([*self.layer().named_parameters(), *self.layer().named_buffers()])
        size = tensors[name].shape[cut.dims[name]] // cut.parts.get(name, 1)
        if uneven := [count for count in range(2, MAX_WORKERS + 1) if size % count]:
            found["uneven"] = uneven[0]
        if self.without_bias() is not None:
            found["no bias"] = self.example.ranks
        return found

    def without_bias(self) -> nn.Module | None:
        """Return the layer without its bias, or None if it does not run so."""
        layer = self.layer()
        if layer._parameters.get("bias") is None:
            return None
        layer.register_parameter("bias", None)
        args, kwargs = self.inputs()
        try:
            layer(*args, **kwargs)
        except Exception:  # the layer's own: its forward needs the bias
            return None
        return layer

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments of the layer; floating-point tensors require gradients."""
        torch.manual_seed(1)
        made = self.example.inputs() if callable(self.example.inputs) else self.example.inputs
        return split_inputs(pytree.tree_map_only(torch.Tensor, _with_gradient, made))

    def shard(self, layer: nn.Module, name: str, dim: int) -> Schedule:
        """Return the schedule of a layer that is split, with the syncs for replicated inputs and outputs."""
        sch, cut = self.schedule(layer), self.cut(name, dim)
        try:
            sch.shard(name, dim, uneven=cut.uneven)
        except ScheduleError as error:
            raise ConformanceError(f"{error}; if this is right, list the call in refused=") from error
        if cut.input == "replicated":
            sch.sync("bwd_post", "all_reduce")
        elif cut.input == "sharded":
            sch.sync("fwd_pre", "scatter", axis=cut.dim)
        if cut.output == "partial":
            sch.sync("fwd_post", "all_reduce")
        else:
            sch.sync("fwd_post", "all_gather", axis=cut.dim)
        return sch

    def compare(self, layer: nn.Module, name: str, dim: int) -> None:
        """Check that the split layer computes the same as the unmodified one, in evaluation and in training."""
        sch = self.shard(copy.deepcopy(layer), name, dim)
        build(sch)
        full = sch.full_state()
        for key, value in layer.state_dict().items():
            if key in full and not torch.equal(full[key], value):
                raise ConformanceError(f"the shards of {key!r} do not make up the parameter")
        args, kwargs = self.inputs()
        options = {**kwargs, "atol": self.example.atol, "rtol": self.example.rtol}
        for training in (False, True, False):
            try:
                assert_equivalent(layer.train(training), sch.mod.train(training), *args, **options)
            except Exception as error:
                kind = "" if isinstance(error, (AssertionError, ScheduleError)) else f"{type(error).__name__}: "
                mode = "training" if training else "evaluation"
                raise ConformanceError(f"in {mode}: {kind}{error}") from error

    def compare_meta(self, name: str, dim: int) -> None:
        """Check that a layer on the meta device gets the same shards, on meta."""
        real, meta = (self.shard(self.layer().to(device), name, dim) for device in ("cpu", "meta"))
        if structure(real) != structure(meta):
            raise ConformanceError(f"on the meta device, {first_difference(structure(real), structure(meta))}")
        if moved := [key for key, each in meta.mod.named_parameters() if not each.is_meta]:
            raise ConformanceError(f"{moved[0]!r} left the meta device")


def _with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _check_registration(kind: str, examples: list[RuleExample]) -> None:
    """Check that ``shard`` finds the rule for each layer."""
    if not examples:
        raise ConformanceError("there is no example")
    for example in examples:
        rule = RuleCase(kind, example).rule()
        if rule is None or rule.kind != kind:
            other = f"the rule {rule.kind!r}" if rule else "no rule"
            raise ConformanceError(f"shard finds {other} for the layer of {example}; is the plugin installed, does it match?")


def _check_split(case: RuleCase, what: str, name: str, dim: int) -> None:
    """Check one split of the layer on this rank."""
    if what == "meta":
        case.compare_meta(name, dim)
        return
    if what == "uneven":
        _check_refusal(case, Refused("divisible", (name, dim)))
        if not case.cut(name, dim).uneven:
            return
    layer = case.without_bias() if what == "no bias" else case.layer()
    assert layer is not None
    case.compare(layer, name, dim)


def _check_refusals(case: RuleCase) -> None:
    """Check that other splits are refused in one sentence, and that nothing has changed then."""
    rule = case.rule()
    known = {(name, dim) for cut in (rule.cuts if rule else ()) for name, dim in cut.dims.items()}
    others = [
        Refused("", (name, dim))
        for name, parameter in case.layer().named_parameters()
        for dim in range(parameter.dim() + 1)
        if (name, dim) not in known and "." not in name
    ]
    for refused in (*case.example.refused, *others):
        _check_refusal(case, refused)


def _check_refusal(case: RuleCase, refused: Refused) -> None:
    sch = case.schedule()
    args = refused.args(sch) if callable(refused.args) else refused.args
    what = f"shard({', '.join(map(repr, args))})"
    before = Snapshot(sch)
    try:
        sch.shard(*args, **refused.kwargs)
    except Exception as error:
        check_sentence(error, what, "shard")
        if not re.search(refused.match, str(error)):
            raise ConformanceError(f"{what} is refused by {str(error)!r}, not with {refused.match!r}") from error
    else:
        ranks = f"{dist.get_world_size()} ranks"
        raise ConformanceError(f"{what} splits the layer over {ranks}; it should be refused with {refused.match!r}")
    if found := before.differences(Snapshot(sch)):
        raise ConformanceError(f"after {what} was refused, {first_of(found)}")
