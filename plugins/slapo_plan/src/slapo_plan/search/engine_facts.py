"""Facts that an engine tells of the step of a layout, and the options of ``build`` that choose the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slapo_core import BuildError
from slapo_training import MemoryRules, MessageMode, PipelineAction, StepModel

from .layouts import Layout
from .occupancy import State, largest_states


@dataclass(frozen=True)
class EngineFacts:
    """Facts of a layout's engine about its step.

    Args:
        rules: Memory of the engine beside the model.
        divided: Kinds of memory that replicas divide among them.
        order: Actions of each rank for a number of micro-batches that shows each rank's peak.
        overlaps: True if gradients are reduced during the last backward.
        messages: How messages between stages are sent.
    """

    rules: MemoryRules
    divided: frozenset[str]
    order: Mapping[int, Sequence[PipelineAction]]
    overlaps: bool
    messages: MessageMode

    @cached_property
    def states(self) -> dict[int, list[State]]:
        """Largest states of each rank."""
        return {rank: largest_states(row) for rank, row in self.order.items()}

    @cached_property
    def most_kept(self) -> int:
        """Most micro-batches whose activations one stage keeps."""
        return max((max(each.kept) + (each.kind == "F") for row in self.states.values() for each in row), default=0)

    @cached_property
    def stages(self) -> dict[int, list[int]]:
        """Stages of each rank."""
        return {rank: sorted({action.stage for action in row}) for rank, row in self.order.items()}


class EngineChoices:
    """Options and facts of each layout of one engine.

    Args:
        model: How the engine runs a step.
        options: Options of ``build`` that all layouts have.
    """

    def __init__(self, model: type[StepModel], options: Mapping[str, Any]) -> None:
        self.model, self._options = model, options
        self.pipelines, self.replicas = model.pipeline_choices(), model.replica_choices()
        self._shown = {name: value for name, value in options.items() if isinstance(value, (bool, int, float, str, Mapping))}
        self._known: dict[tuple[Any, ...], EngineFacts | str] = {}

    def build_options(self, layout: Layout) -> dict[str, Any]:
        """Return the options of ``build`` of a layout, all but those that are functions, such as the optimizer."""
        found = {"microbatches": layout.microbatches, **self._shown}
        if layout.dp > 1:
            found = _join_options(found, self.replicas[layout.data_parallel].options)
        if layout.pp > 1:
            found = _join_options(found, self.pipelines[layout.pipeline_schedule].options)
        return found

    def facts(self, layout: Layout) -> EngineFacts | str:
        """Return the facts of a layout, or why the engine cannot run it."""
        stages = layout.pp * (self.pipelines[layout.pipeline_schedule].stages_per_rank if layout.pp > 1 else 1)
        few = min(layout.microbatches, 2 * stages)  # every rank has reached its peak, unless the schedule keeps all of them
        facts = self._facts(layout, stages, few)
        if isinstance(facts, str) or stages == 1 or facts.most_kept < few:
            return facts
        return self._facts(layout, stages, layout.microbatches)

    def _facts(self, layout: Layout, stages: int, microbatches: int) -> EngineFacts | str:
        key = layout.pp, stages, min(layout.dp, 2), layout.data_parallel, layout.pipeline_schedule, microbatches
        if key not in self._known:
            self._known[key] = self._read_facts(layout, stages, microbatches)
        return self._known[key]

    def _read_facts(self, layout: Layout, stages: int, microbatches: int) -> EngineFacts | str:
        options = {**self._options, **self.build_options(layout), "microbatches": microbatches}
        try:
            order = self.model.action_order(options, stages, layout.pp, microbatches)
            rules = self.model.memory_rules(options, stages, layout.pp, layout.dp)
        except BuildError as err:
            return str(err)
        divided = frozenset(self.replicas[layout.data_parallel].divided) if layout.dp > 1 else frozenset[str]()
        return EngineFacts(
            rules,
            divided,
            order,
            self.model.overlaps_reduction(options, stages, layout.pp),
            self.model.message_mode(options, stages, layout.pp, microbatches),
        )


def _join_options(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings as one; nested ones are joined, too."""
    found = dict(left)
    for name, value in right.items():
        before = found.get(name)
        found[name] = _join_options(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return found
