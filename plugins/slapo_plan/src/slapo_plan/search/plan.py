"""``slapo.plan``: the layouts that fit, the fastest first, and why the others are not."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import SlapoError
from slapo_report import format_count

from ..estimation.result import Estimate
from ..hardware import Hardware
from .candidates import Candidate
from .constraints import CONSTRAINTS, check_constraints
from .layouts import Rejection
from .model_source import ModelSource


@dataclass
class Plan:
    """Layouts of a model on a cluster, fastest first.

    Args:
        candidates: Layouts that fit: first those whose real schedule was estimated, each by step time.
        rejected: Layouts that do not, with reasons.
        hardware: The cluster.
        notes: What a schedule leaves whole.
    """

    candidates: list[Candidate]
    rejected: list[Rejection]
    hardware: Hardware
    notes: list[str] = field(default_factory=list)
    _source: ModelSource | None = None

    @property
    def best(self) -> Candidate:
        """The fastest layout.

        Raises:
            SlapoError: none fits; says by how much the smallest misses.
        """
        if not self.candidates:
            raise SlapoError(f"plan: no layout fits {self.hardware.name}: {self.shortage}")
        return self.candidates[0]

    @property
    def shortage(self) -> str:
        """Sentence on the rejected layout that comes nearest: the one that misses fewest bytes, or the first one."""
        short = [each for each in self.rejected if each.missing]
        if not short:
            return str(self.rejected[0]) if self.rejected else "the constraints leave no layout"
        return f"the nearest is {min(short, key=lambda each: each.missing)}"

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates)

    def explain(self, **settings: Any) -> list[Candidate | Rejection]:
        """Return the candidates and rejections of the layouts with these settings, e.g. ``tp=8, pp=4``.

        Raises:
            UnknownNameError: no such setting.
        """
        wanted = check_constraints(settings)
        found: list[Candidate | Rejection] = [*self.candidates, *self.rejected]
        return [each for each in found if all(each.settings.get(name, values[0]) in values for name, values in wanted.items())]

    def mesh(self, candidate: Candidate | None = None) -> Any:
        """Return the device mesh of a candidate, by default the best, on the ranks of this job. Collective.

        Raises:
            SlapoError: no layout fits, or the job has another number of ranks.
        """
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  costs half a second

        layout = (candidate or self.best).layout
        sizes = (layout.pp, layout.dp, layout.tp)
        wanted, found = math.prod(sizes), _world_size()
        if wanted != found:
            words = f"{format_count(wanted, 'rank')}, and this job has {found}"
            raise SlapoError(f"plan: the mesh of {layout} has {words}; start {wanted}, e.g. by torchrun")
        return init_device_mesh(self.hardware.device_type, sizes, mesh_dim_names=("pp", "dp", "tp"))

    def estimate(self, candidate: Candidate | None = None) -> Estimate:
        """Return the estimate of a candidate's real schedule, by default the best: exact in memory and traffic."""
        assert self._source is not None
        return self._source.estimate(candidate or self.best)

    def recomputations(self, candidate: Candidate) -> dict[str, Candidate | Rejection]:
        """Return a candidate with one checkpoint policy for all of its blocks, or why that does not fit, by policy.

        The policies are those with which the blocks were measured, ``"none"`` first.
        """
        assert self._source is not None
        return self._source.recomputations(candidate)

    @property
    def model(self) -> nn.Module:
        """The model that was planned."""
        assert self._source is not None
        return self._source.model

    @property
    def target(self) -> str:
        """Name of the engine's dialect."""
        assert self._source is not None
        return self._source.target

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of ``build`` that all candidates have, with the optimizer."""
        assert self._source is not None
        return self._source.options

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        found = [
            {
                **each.settings,
                "step_seconds": each.step_seconds,
                "peak_bytes": each.peak,
                "bubble": each.bubble,
                "mfu": each.mfu,
            }
            for each in self.candidates
        ]
        rejected = [{"what": each.what, **each._asdict()} for each in self.rejected]
        return {"hardware": self.hardware.name, "candidates": found, "rejected": rejected, "notes": [*self.notes]}

    def __str__(self) -> str:
        lines = [f"{index}. {each}" for index, each in enumerate(self.candidates[:10], 1)]
        if len(self.candidates) > 1 and self.candidates[0].step_seconds <= self.candidates[1].step_seconds:
            lines.insert(1, f"   {_advantage(*self.candidates[:2])}")
        lines += [f"note: {note}" for note in self.notes]
        if not self.candidates:
            lines.append("no layout fits")
        shown = self.rejected[:5]
        lines += [f"not: {each}" for each in shown]
        if len(self.rejected) > len(shown):
            lines.append(f"and {len(self.rejected) - len(shown)} more that do not fit")
        return "\n".join(lines)


def plan(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    *,
    ranks: int,
    global_batch: int,
    hardware: str | PathLike[str] | Hardware = "this-machine",
    constraints: Mapping[str, Any] | None = None,
    check: int = 1,
    target: str = "torch",
    **options: Any,
) -> Plan:
    """Search the layouts of a model: tensor, pipeline and data parallelism, micro-batches, and recomputation.

    The model is not changed. Its weights may be on meta. Each degree of tensor parallelism is measured once, with few of the
    equal blocks; no rank has to exist.

    Args:
        model: The unmodified model.
        batch: Arguments of its forward by name, with rows in dimension 0; any number of rows.
        ranks: Number of devices.
        global_batch: Rows of a step over all replicas.
        hardware: Name or path of a hardware file, or a ``Hardware``.
        constraints: Allowed values of ``tp``, ``pp``, ``dp``, ``rows``, ``microbatches``, ``sequence_parallel``,
            ``data_parallel``, ``pipeline_schedule``, ``parallel_loss`` and ``kernels``; a value or a list. The last two are
            used only if they are given, since a model then returns no logits with its loss, and since kernels may round
            otherwise.
        check: Number of best candidates whose real schedule is estimated; those that do not fit are rejected.
        target: Name of an installed dialect.
        **options: Further options of ``build``, e.g. ``precision="bf16"``.

    Raises:
        UnknownNameError: no such hardware, target or constraint.
        ContradictionError: the constraints leave no layout; says which of them could have another value.
        SlapoError: an argument is of a wrong kind, or the model does not run on fake tensors.
    """
    for name, number, least in (("ranks", ranks, 1), ("global_batch", global_batch, 1), ("check", check, 0)):
        if type(number) is not int or number < least:
            raise SlapoError(f"plan: {name} is {number!r}; give a whole number from {least} on")
    _check_subject(model, batch, hardware)
    if misplaced := [name for name in options if name in CONSTRAINTS]:
        name = misplaced[0]
        raise SlapoError(f"plan: {name} is chosen by the plan; give constraints={{{name!r}: {options[name]!r}}} for this value")
    cluster = hardware if isinstance(hardware, Hardware) else Hardware.load(hardware)
    source = ModelSource(model, batch, target, options, cluster.for_job(ranks))
    candidates, rejected = source.search(ranks, global_batch, check_constraints(constraints or {}))
    candidates, others = source.check_best(candidates, check)
    return Plan(candidates, [*others, *rejected], source.hardware, [*dict.fromkeys(source.notes)], _source=source)


def _check_subject(model: Any, batch: Any, hardware: Any) -> None:
    """Refuse arguments of other kinds than the search takes."""
    if not isinstance(model, nn.Module):
        kind = model.__name__ if isinstance(model, type) else f"a {type(model).__name__}"
        raise SlapoError(f"plan: the model is {kind}; give an nn.Module without steps; slapo.estimate takes a schedule")
    if not isinstance(batch, Mapping):
        raise SlapoError(f"plan: the batch is a {type(batch).__name__}; give the arguments of the forward by name, in a dict")
    if not isinstance(hardware, (str, PathLike, Hardware)):
        raise SlapoError(f"plan: hardware is a {type(hardware).__name__}; give a name, the path of a file, or a Hardware")


def _world_size() -> int:
    """Return the number of ranks of this job, before or after it has a process group."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def _advantage(best: Candidate, other: Candidate) -> str:
    """Return why the best is faster than the next, in a clause."""
    gains = {
        "less waiting in the pipeline": other.bubble * other.step_seconds - best.bubble * best.step_seconds,
        "less recomputation and faster passes": _passes(other) - _passes(best),
        "less exposed reduction and optimizer": other.after - best.after,
    }
    name = max(gains, key=lambda each: gains[each])
    return f"{other.step_seconds / best.step_seconds - 1:.1%} faster than the next: {name}"


def _passes(candidate: Candidate) -> float:
    seconds = sum(each.forward + each.backward for each in candidate.stages)
    return candidate.layout.microbatches * seconds / len(candidate.stages)
