"""The candidates of a plan as a space: layout, options of ``build`` and recomputation are symbols."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slapo_core import Schedule
from slapo_plan import Candidate, Plan, Rejection

from ..search_space.space import Space
from ..search_space.symbol import TuneError
from .schedule_space import ScheduleSpace, configuration_key, value_key

CHECKPOINTING = "checkpointing"
"""Symbol of the checkpoint policy of all blocks."""

KEEP = "none"
"""Its value where nothing is recomputed."""

LEAST = "least"
"""Its value for blocks with several policies: the least recomputation with which the layout fits."""

Values = Mapping[str, Any]


class PlannedConfiguration(NamedTuple):
    """One configuration of the space.

    Args:
        settings: Values of its symbols, in the order of declaration.
        candidate: What runs it; None if the plan rules it out.
        reason: The plan's sentence on why it cannot work; ``""`` if it may.
    """

    settings: Values
    candidate: Candidate | None = None
    reason: str = ""

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a training step."""
        return self.candidate.step_seconds if self.candidate else float("inf")


_FLAGS = ("parallel_loss", "kernels")
"""Settings that are symbols only where a candidate of the plan has them."""


class PlannedSpace:
    """A plan as a space, as the schedule of a configuration, and as the predictions of a search.

    The symbols are ``tp``, ``pp``, ``dp``, ``data_parallel`` of several replicas, ``sequence_parallel`` of several
    tensor-parallel ranks, ``pipeline_schedule`` of several stages, ``microbatches``, and ``checkpointing``; where the plan has
    them, also ``parallel_loss`` and ``kernels``. Their defaults are the fastest candidate.

    Args:
        plan: The plan.

    Attributes:
        candidates: Configurations that may work, fastest first.
        rejected: Layouts that the plan rules out before they are configurations.

    Raises:
        TuneError: no layout fits.
    """

    def __init__(self, plan: Plan) -> None:
        if not plan.candidates:
            reasons = "; ".join(map(str, plan.rejected[:3])) or "the constraints leave none"
            raise TuneError(f"plan: no layout fits {plan.hardware.name}, so there is nothing to try: {reasons}")
        flags = [name for name in _FLAGS if any(each.settings[name] for each in plan.candidates)]
        found = [each for candidate in plan.candidates for each in _recomputations(plan, candidate, flags)]
        self.candidates = sorted((each for each in found if each.candidate), key=lambda each: each.step_seconds)
        ruled_out = [each for each in found if not each.candidate]
        whole = [each for each in plan.rejected if _is_layout(each)]
        ruled_out += [PlannedConfiguration(layout_values(each.settings, flags), None, each.reason) for each in whole]
        self.rejected = [each for each in plan.rejected if not _is_layout(each)]
        self._configurations = {configuration_key(each.settings): each for each in [*ruled_out, *self.candidates]}
        self._symbols = _symbol_tree([*self.candidates, *ruled_out])

    def declare(self, space: ScheduleSpace) -> None:
        """Declare the symbols of a configuration."""
        prefix: tuple[str, ...] = ()
        while prefix in self._symbols:
            name, values = self._symbols[prefix]
            ordered = sorted(values) if all(type(value) is int for value in values) else values
            prefix += (value_key(space.choice(name, ordered, default=values[0])),)

    def schedule(self, sch: Schedule, space: Values) -> None:
        """Take the steps of a configuration."""
        self.candidate(space).apply(sch)

    def build_options(self, values: Values) -> Values:
        """Return the options of ``build`` of a configuration."""
        return self.candidate(values).build_options

    def impossible(self, settings: Values) -> str:
        """Return the plan's sentence on why a configuration cannot work, or ``""``."""
        found = self._configurations.get(configuration_key(settings))
        return found.reason if found else ""

    def save(self, values: Values, path: Path) -> None:
        """Write the schedule of a configuration, with its layout and options of ``build``, as a Python schedule file."""
        self.candidate(values).save(path)
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n")

    def candidate(self, values: Values) -> Candidate:
        """Return the candidate of a configuration.

        Raises:
            TuneError: the plan has no such configuration, or rules it out.
        """
        found = self._configurations.get(configuration_key(values))
        if found is None or found.candidate is None:
            reason = found.reason if found else "the plan has no such configuration; use another database or name"
            raise TuneError(f"{Space.cfg_dict_to_str(dict(values))}: {reason}")
        return found.candidate

    @property
    def digest(self) -> str:
        """A short text that is equal for plans whose configurations take the same steps."""
        facts = [(each.settings, each.candidate and (each.candidate.steps(), each.candidate.build_options)) for each in self]
        return hashlib.sha256(repr(sorted(map(repr, facts))).encode()).hexdigest()[:8]

    def __iter__(self) -> Iterator[PlannedConfiguration]:
        return iter(self._configurations.values())


def layout_values(settings: Values, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of symbols of a layout, without those that choose among what it has one of.

    Args:
        settings: Settings of a candidate or of a rejected layout.
        flags: Further settings that are symbols.
    """
    tp, pp, dp = (settings[name] for name in ("tp", "pp", "dp"))
    chosen = {"data_parallel": dp > 1, "sequence_parallel": tp > 1, "pipeline_schedule": pp > 1}
    options = {name: settings[name] for name, several in chosen.items() if several}
    return {"tp": tp, "pp": pp, "dp": dp, **options, **{name: settings[name] for name in (*flags, "microbatches")}}


def _is_layout(rejection: Rejection) -> bool:
    return {"tp", "pp", "dp", "rows", "microbatches", "pipeline_schedule"} <= rejection.settings.keys()


def _recomputations(plan: Plan, candidate: Candidate, flags: Sequence[str]) -> Iterator[PlannedConfiguration]:
    """Yield a candidate as it is, and with each checkpoint policy for all of its blocks."""
    values, own = layout_values(candidate.settings, flags), {*candidate.policies}
    name = next(iter(own)) if len(own) == 1 else LEAST if own else KEEP
    yield PlannedConfiguration({**values, CHECKPOINTING: name}, candidate)
    for policy, found in plan.recomputations(candidate).items():
        if policy != name:
            settings = {**values, CHECKPOINTING: policy}
            if isinstance(found, Candidate):
                yield PlannedConfiguration(settings, found)
            else:
                yield PlannedConfiguration(settings, None, found.reason)


def _symbol_tree(configurations: Sequence[PlannedConfiguration]) -> dict[tuple[str, ...], tuple[str, list[Any]]]:
    """Return the symbol that comes after some values, and the values that it has there, those of the fastest first."""
    found: dict[tuple[str, ...], tuple[str, list[Any]]] = {}
    for each in configurations:
        prefix: tuple[str, ...] = ()
        for name, value in each.settings.items():
            _, values = found.setdefault(prefix, (name, []))
            if value not in values:
                values.append(value)
            prefix += (value_key(value),)
    return found
