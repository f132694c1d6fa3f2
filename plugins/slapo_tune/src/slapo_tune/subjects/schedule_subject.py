"""A schedule of a model as the subject of a tuning."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import Schedule, SlapoError, build_program, default_registry, set_random_seed

from ..measurement.job import AXES, TrialJob
from ..schedule_space.schedule_file import SpaceFunction, append_best, declare
from ..schedule_space.schedule_space import ScheduleSpace
from ..search_space.symbol import TuneError
from ..study.trial_result import TrialResult
from ..trial.process import Interruption, TrialOutput, run_trial
from ..trial.reports import Prune, ReportReader
from ..trial.temporary_files import temporary_file_errors
from ..trial.throughput import printed_result
from .subject import UnfinishedVerificationError, last_line, output_problem, own_error, trial_result

_COMMON_OPTIONS = ("microbatches", "precision", "clip")
"""Options of every target; the hook ``slapo_before_build`` sees only the others, as in ``slapo.build``."""


class ScheduleSubject:
    """A schedule of a model, trained for a few steps in each trial.

    Every configuration is scheduled first in this process, on empty weights and a fake world of as many ranks. This declares
    the symbols of ``schedule(sch, space)`` and finds what is refused.

    Args:
        job: Model, schedule, batch and options.
        space: ``space(space)`` of the function or the file, or None.
        timeout: Seconds of a trial; None for any.
        name: Name of the study; default: made of the model, batch, layout and target.
    """

    def __init__(self, job: TrialJob, space: SpaceFunction | None, timeout: float | None, name: str = "") -> None:
        if dist.is_initialized():
            raise TuneError("tune: a process group is initialised here; call it from one process, it starts the ranks itself")
        self._job, self._space, self._timeout = job, space, timeout
        with temporary_file_errors():
            self._folder = tempfile.TemporaryDirectory(prefix="slapo-tune-")
        self._file = Path(self._folder.name, "job.pt")
        try:
            with temporary_file_errors():
                job.save(self._file)
            self.name = f"{name}, {job.title}" if name and job.title else name or _study_name(job)
        except BaseException:
            self.close()
            raise
        self.command = f"slapo.tune of {self.name}"
        self.space_function: SpaceFunction | None = None if space is None else partial(declare, space)

    def close(self) -> None:
        """Remove the temporary files."""
        self._folder.cleanup()

    def declare(self, space: ScheduleSpace) -> str:
        """Declare all symbols of a configuration by scheduling the model; return the sentence of a refusal, or ``""``."""
        declare(self._space, space)
        early = set(space)
        try:
            with self._fake_world(space) as schedule:
                self._check(schedule, space)
        except TuneError:
            raise
        except Exception as err:  # the user's schedule runs here
            return f"refused: {'' if isinstance(err, SlapoError) else f'{type(err).__name__}: '}{err}"
        finally:
            if late := [name for name in (*AXES, "microbatches") if name in space and name not in early]:
                raise TuneError(f"symbol {late[0]!r}: the layout needs it before the schedule runs; declare it in space(space)")
        return ""

    def steps_source(self, values: Mapping[str, Any], path: Path) -> None:
        """Write the steps of a configuration as a Python schedule file, with its values for the flags of a run.

        Raises:
            ScheduleError: an argument of a step has no written form.
        """
        space = ScheduleSpace(values)
        declare(self._space, space)
        with self._fake_world(space) as schedule:
            schedule.save(path)
        append_best(path, values)

    def _check(self, sch: Schedule, space: ScheduleSpace) -> None:
        """Do the work of ``build`` up to the weights."""
        options = self._job.build_options(space)
        common = {name: options.pop(name) for name in _COMMON_OPTIONS if name in options}
        dialect = default_registry().get("dialect", self._job.target)
        default_registry().hook.slapo_before_build(schedule=sch, target=self._job.target, config=options)
        dialect.check(build_program(sch), optimizer=self._job.optimizer, loss_fn=self._job.loss_fn, **common, **options)

    @contextmanager
    def _fake_world(self, space: ScheduleSpace) -> Iterator[Schedule]:
        """Schedule the model without weights as rank 0 of a world whose collectives do nothing."""
        sizes = self._job.sizes(space)
        excepthook = sys.excepthook  # init_process_group puts the rank in front of tracebacks
        with torch.random.fork_rng(devices=[]):
            set_random_seed(self._job.seed, tp_rank=0)
            dist.init_process_group("fake", rank=0, world_size=sizes[0] * sizes[1] * sizes[2])
            try:
                mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
                yield self._job.make_schedule(self._job.empty_model(), mesh, space, space)
            finally:
                dist.destroy_process_group()
                sys.excepthook = excepthook

    def measure(self, number: int, values: Mapping[str, Any], prune: Prune, interruption: Interruption) -> TrialResult | None:
        """Train a few steps on ranks of their own; None after an interruption."""
        reports = ReportReader(prune)
        output = self._run(values, {"mode": "measure"}, self._timeout, interruption, reports)
        if output is None:
            return None
        found = printed_result(output.stdout.splitlines())
        return trial_result(number, values, output, found, self._timeout, "the trial", reports)

    def verify(self, values: Mapping[str, Any], interruption: Interruption) -> str | None:
        """Compare a training step with the unmodified model's; return what is wrong, or ``""``; None if interrupted.

        Raises:
            UnfinishedVerificationError: its processes ended without a verdict, such as out of memory.
        """
        output = self._run(values, {"mode": "verify"}, self._timeout, interruption)
        if output is None:
            return None
        found = last_line(output.stdout, lambda line: "verified" in line)
        if output.exit_code == 0 and found is not None:
            return "" if found["verified"] else f"not the same as the unmodified model: {found['report']}"
        problem = output_problem(output, self._timeout, "the verification") or "the verification printed no verdict"
        raise UnfinishedVerificationError(own_error(output) or problem)

    def _run(
        self,
        values: Mapping[str, Any],
        order: Mapping[str, Any],
        timeout: float | None,
        interruption: Interruption,
        reports: ReportReader | None = None,
    ) -> TrialOutput | None:
        sizes = self._job.sizes(values)
        text = json.dumps({"values": dict(values), "ranks": sizes[0] * sizes[1] * sizes[2], **order})
        command = [sys.executable, "-m", "slapo_tune.measurement.launcher", str(self._file), text]
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        return run_trial(command, {}, timeout, interruption, {"PYTHONPATH": paths}, reports)


def _study_name(job: TrialJob) -> str:
    """Return a name that is equal for equal models, batches, layouts and targets."""
    model = job.empty_model()
    parameters = [(name, tuple(each.shape)) for name, each in model.named_parameters()]
    count = sum(each.numel() for each in model.parameters())
    shapes = [tuple(leaf.shape) for leaf in torch.utils._pytree.tree_leaves(job.batch) if isinstance(leaf, torch.Tensor)]
    schedule = job.schedule if isinstance(job.schedule, str) else getattr(job.schedule, "__qualname__", "schedule")
    title = job.title or os.path.basename(schedule)
    facts = [
        parameters,
        shapes,
        dict(job.layout),
        sorted((name, getattr(value, "__qualname__", str(value))) for name, value in job.options.items()),
    ]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
    return f"{title} of {_class_name(model)} ({count} parameters) for {job.target} on {job.device}, {digest}"


def _class_name(model: nn.Module) -> str:
    return type(model).__name__
