"""Layouts that the constraints allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from slapo_core import SlapoError, UnknownNameError
from slapo_training import PipelineChoice, ReplicaChoice

Step = tuple[str, str, dict[str, Any]]
"""Step of a schedule: path, primitive and arguments."""


class ModelForm(NamedTuple):
    """Form of the model that layouts share: the part of it that a tensor-parallel rank has.

    Args:
        tp: Number of tensor-parallel ranks.
        sequence_parallel: True if tensor parallelism also splits what lies between its layers.
        parallel_loss: True if the loss is computed from each rank's part of the logits, which are not gathered.
        kernels: True for ``use_kernels()``, whose eager forms are measured.
    """

    tp: int = 1
    sequence_parallel: bool = False
    parallel_loss: bool = False
    kernels: bool = False

    def steps(self) -> list[Step]:
        """Return the steps that make it of an unmodified model."""
        arguments = {name: True for name in ("sequence_parallel", "parallel_loss") if getattr(self, name)}
        found: list[Step] = [("", "tensor_parallel", arguments)] if self.tp > 1 else []
        return [*found, ("", "use_kernels", {})] if self.kernels else found


class Layout(NamedTuple):
    """One way to run a model.

    Args:
        tp: Number of tensor-parallel ranks.
        pp: Number of pipeline ranks.
        dp: Number of replicas.
        rows: Rows of a micro-batch.
        microbatches: Micro-batches of a step on each replica.
        sequence_parallel: True if tensor parallelism also splits what lies between its layers.
        data_parallel: Name of a ``ReplicaChoice`` of the target, e.g. ``"fsdp"``; the first of them with one replica.
        pipeline_schedule: Name of a ``PipelineChoice`` of the target; the first of them without a pipeline.
        parallel_loss: As in ``ModelForm``.
        kernels: As in ``ModelForm``.
    """

    tp: int
    pp: int
    dp: int
    rows: int
    microbatches: int
    sequence_parallel: bool = False
    data_parallel: str = "ddp"
    pipeline_schedule: str = "1f1b"
    parallel_loss: bool = False
    kernels: bool = False

    @property
    def form(self) -> ModelForm:
        """The form of the model."""
        return ModelForm(*(getattr(self, name) for name in ModelForm._fields))

    def __str__(self) -> str:
        words = [f"tp={self.tp}", f"pp={self.pp}", f"dp={self.dp}"]
        if self.dp > 1:
            words.append(self.data_parallel)
        words += _words_of_flags(self._asdict())
        if self.pp > 1:
            words.append(self.pipeline_schedule)
        return " ".join([*words, f"micro-batches={self.microbatches}x{self.rows}"])


class Rejection(NamedTuple):
    """Layouts that cannot run.

    Args:
        settings: Settings that all of them have, by the names of ``Layout``.
        reason: One sentence.
        missing: Bytes that the fullest rank needs beyond the usable memory; 0 for other reasons.
    """

    settings: Mapping[str, Any]
    reason: str
    missing: int = 0

    @property
    def what(self) -> str:
        """The layout, or what the layouts have in common."""
        if {*Layout._fields} <= self.settings.keys():
            return str(Layout(**self.settings))
        words = [f"{name}={value}" for name, value in self.settings.items() if not isinstance(value, bool)]
        return " ".join([*words, *_words_of_flags(self.settings)])

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


def _words_of_flags(settings: Mapping[str, Any]) -> list[str]:
    return [name.replace("_", " ") for name, value in settings.items() if value is True]


class ContradictionError(SlapoError):
    """Constraints that leave no layout of a number of ranks and a global batch."""


class LayoutSpace:
    """All layouts of a number of ranks, without those that the constraints rule out.

    Args:
        ranks: Number of ranks.
        global_batch: Rows of a step over all replicas.
        blocks: Number of blocks that stages can be cut at.
        devices_per_node: Number that ``tp`` divides, so that its groups lie within nodes, unless a constraint says otherwise.
        constraints: Allowed values by name, from ``check_constraints``.
        pipelines: Pipeline schedules of the target.
        replicas: Ways of the target to run replicas.

    Raises:
        UnknownNameError: the target has no such pipeline schedule or way to run replicas.
    """

    def __init__(
        self,
        ranks: int,
        global_batch: int,
        blocks: int,
        devices_per_node: int,
        constraints: Mapping[str, tuple[Any, ...]],
        pipelines: Mapping[str, PipelineChoice],
        replicas: Mapping[str, ReplicaChoice],
    ) -> None:
        self.ranks, self.global_batch, self.blocks = ranks, global_batch, blocks
        self.devices_per_node, self.constraints = devices_per_node, constraints
        self.pipelines, self.replicas = pipelines, replicas
        self.rejected: list[Rejection] = []
        for name, known in (("pipeline_schedule", pipelines), ("data_parallel", replicas)):
            for value in constraints.get(name, ()):
                if value not in known:
                    raise UnknownNameError.of(name, value, known)

    def without(self, name: str) -> LayoutSpace:
        """Return the space without one of its constraints."""
        others = {each: values for each, values in self.constraints.items() if each != name}
        return LayoutSpace(
            self.ranks, self.global_batch, self.blocks, self.devices_per_node, others, self.pipelines, self.replicas
        )

    def degrees(self) -> list[int]:
        """Return the degrees of tensor parallelism.

        Raises:
            ContradictionError: none divides the ranks.
        """
        given = self.constraints.get("tp")
        found = [tp for tp in _divisors(self.ranks) if (tp in given if given else self.devices_per_node % tp == 0)]
        if not found:
            words = ", ".join(map(str, given or ()))
            nearest = ", ".join(map(str, _divisors(self.ranks)[:8]))
            raise ContradictionError(f"plan: tp={words} does not divide {self.ranks} ranks; these do: {nearest}")
        return found

    def layouts(self, tp: int) -> Iterator[Layout]:
        """Iterate over the layouts with a degree of tensor parallelism."""
        for pp in _divisors(self.ranks // tp):
            if not self._allows("pp", pp):
                continue
            if pp > max(1, self.blocks):
                self.rejected.append(Rejection({"tp": tp, "pp": pp}, f"the model has {self.blocks} blocks to cut between"))
                continue
            dp = self.ranks // tp // pp
            if self._allows("dp", dp):
                yield from self._batches(tp, pp, dp)

    def _batches(self, tp: int, pp: int, dp: int) -> Iterator[Layout]:
        share, rest = divmod(self.global_batch, dp)
        if rest or not share:
            near = max(dp, round(self.global_batch / dp) * dp)
            reason = f"a global batch of {self.global_batch} rows is not divisible by {dp} replicas; {near} is the nearest"
            self.rejected.append(Rejection({"tp": tp, "pp": pp, "dp": dp}, reason))
            return
        for rows in _divisors(share):
            microbatches = share // rows
            if rows & (rows - 1) and rows != share and "rows" not in self.constraints:
                continue  # powers of two, and the whole share
            if self._allows("rows", rows) and self._allows("microbatches", microbatches):
                yield from self._options(Layout(tp, pp, dp, rows, microbatches))

    def _options(self, layout: Layout) -> Iterator[Layout]:
        if layout.dp == 1 and not self._allows("data_parallel", self._replicas(layout)[0]):
            words = " or ".join(map(str, self.constraints["data_parallel"]))
            self._reject(layout, ("tp", "pp", "dp"), f"there is one replica, and {words} needs 2 or more; leave it out")
        choices: dict[str, Sequence[Any]] = {
            "sequence_parallel": self._flags("sequence_parallel", (False, True)) if layout.tp > 1 else (False,),
            "parallel_loss": self._flags("parallel_loss", (False,)) if layout.tp > 1 else (False,),
            "kernels": self._flags("kernels", (False,)),
            "data_parallel": self._replicas(layout),
            "pipeline_schedule": self._pipelines(layout),
        }
        for values in product(*choices.values()):
            found = layout._replace(**dict(zip(choices, values, strict=True)))
            if all(self._allows(name, getattr(found, name)) for name in ("sequence_parallel", "data_parallel")):
                yield found

    def _flags(self, name: str, default: Sequence[bool]) -> Sequence[bool]:
        return tuple(map(bool, self.constraints.get(name, default)))

    def _replicas(self, layout: Layout) -> list[str]:
        if layout.dp == 1:
            return [next(iter(self.replicas))]
        return [name for name, choice in self.replicas.items() if layout.pp == 1 or choice.allows_pipeline]

    def _pipelines(self, layout: Layout) -> list[str]:
        """Return the pipeline schedules; those with several stages on a rank need as many blocks and micro-batches."""
        if layout.pp == 1:
            return [next(iter(self.pipelines))]
        wanted = self.constraints.get("pipeline_schedule")
        found = []
        for name, choice in self.pipelines.items():
            stages = layout.pp * choice.stages_per_rank
            is_asked = choice.is_default if wanted is None else name in wanted
            if is_asked and (choice.stages_per_rank == 1 or stages <= min(self.blocks, layout.microbatches)):
                found.append(name)
            elif is_asked and wanted is not None:
                have = f"the model has {self.blocks} blocks, and a step {layout.microbatches} micro-batches"
                reason = f"{name} has {stages} stages, and needs as many blocks and micro-batches; {have}"
                self._reject(layout, ("tp", "pp", "dp", "microbatches"), reason)
        return found

    def _reject(self, layout: Layout, names: Sequence[str], reason: str) -> None:
        rejection = Rejection({name: getattr(layout, name) for name in names}, reason)
        if rejection not in self.rejected:
            self.rejected.append(rejection)

    def _allows(self, name: str, value: Any) -> bool:
        return name not in self.constraints or value in self.constraints[name]


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
