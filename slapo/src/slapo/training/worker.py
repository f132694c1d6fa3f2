"""Work of one rank of ``slapo train``, and the console output of rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console  # noqa: TID253
from rich.markup import escape  # noqa: TID253
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: TID253
from rich.table import Table  # noqa: TID253
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slapo.report.page import write_report
from slapo_core import Engine, Schedule, VerifyError, build, init_empty_weights, set_random_seed
from slapo_report import format_count
from slapo_weights import Weights

from ..run_data.record import ModuleRecord, RankRecord, RunRecord, module_records, step_records
from ..run_data.settings import Settings, engine_options
from .corpus import Corpus, read_corpus
from .model_folder import folder_weights
from .models import build_model
from .preflight_check import AXES
from .reference import make_optimizer, reference_losses
from .run_schedule import schedule_model


def train_rank(settings: Settings) -> None:
    """Train as one rank of a world that the environment describes; rank 0 then compares and reports.

    Raises:
        VerifyError: the losses are not the reference's.
    """
    console = Console(quiet=os.environ["RANK"] != "0")
    corpus = read_corpus(settings)
    with process_group(settings):
        print_header(console, settings, corpus.source)
        record = train(settings, corpus, console)
    if record is not None:
        report_run(record, corpus, console)


def train(settings: Settings, corpus: Corpus, console: Console) -> RunRecord | None:
    """Schedule, build and train on all ranks of the default process group; return the record on rank 0, else None."""
    mesh = init_device_mesh(settings.device, (settings.pp, settings.dp, settings.tp), mesh_dim_names=AXES)
    set_random_seed(settings.seed, dp_rank=_rank(mesh, "dp"), pp_rank=_rank(mesh, "pp"), tp_rank=_rank(mesh, "tp"))
    with init_empty_weights():
        model = build_model(settings)
    modules = module_records(model)
    sch = schedule_model(model, settings, mesh)
    options = engine_options(settings)
    if weights := folder_weights(settings):
        options["weights"] = Weights(weights, cast=True)
    engine = build(sch, settings.target, optimizer=make_optimizer(settings), seed=settings.seed, **options)
    start = time.perf_counter()
    losses = list(with_progress(console, "training", _losses(engine, settings, corpus, _rank(mesh, "dp")), settings.steps))
    seconds = time.perf_counter() - start
    record = _record(sch, engine, mesh, modules, settings)
    if record is not None:
        record.source, record.losses, record.seconds = corpus.source, losses, seconds
        if settings.report:
            folder = Path(settings.report)
            folder.mkdir(parents=True, exist_ok=True)
            sch.save(folder / "schedule.json")
    return record


def report_run(record: RunRecord, corpus: Corpus, console: Console) -> None:
    """Train the reference, print both losses, write the report; the last things of a run, on rank 0 alone."""
    settings = record.settings
    if settings.reference:
        record.reference = list(with_progress(console, "reference", reference_losses(settings, corpus), settings.steps))
        print_comparison(console, record)
    if settings.report:
        console.print(f"report: {write_report(record, Path(settings.report))}", highlight=False, soft_wrap=True)
    if record.is_refuted:
        raise VerifyError(verdict(record))


@contextmanager
def process_group(settings: Settings) -> Iterator[None]:
    """Open the default process group from the launcher's environment for the block."""
    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if settings.device == "cuda" else "gloo")
    yield
    dist.destroy_process_group()  # after an error the other ranks may hang in a collective: leave without them


def _losses(engine: Engine, settings: Settings, corpus: Corpus, dp_rank: int) -> Iterator[float]:
    rows = settings.batch // settings.dp
    for batch in corpus.batches(settings):
        share = {name: tensor[dp_rank * rows : (dp_rank + 1) * rows].to(settings.device) for name, tensor in batch.items()}
        yield engine.train_batch(**share).item()


def _rank(mesh: DeviceMesh, axis: str) -> int:
    return mesh[axis].get_local_rank()


def _record(
    sch: Schedule, engine: Engine, mesh: DeviceMesh, modules: list[ModuleRecord], settings: Settings
) -> RunRecord | None:
    """Gather the ranks' records, collectively; return the record of the run on rank 0, else None."""
    assert sch.program is not None, "build leaves its program here"
    program, stages = sch.program, sch.program.stages
    own = RankRecord(
        rank=dist.get_rank(),
        pp=_rank(mesh, "pp"),
        dp=_rank(mesh, "dp"),
        tp=_rank(mesh, "tp"),
        stages=tuple(stage.index for stage in stages if program.rank_of(stage.index) == _rank(mesh, "pp")),
        params=sum(p.numel() for p in engine.module.parameters()),
    )
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (own, getattr(engine, "timeline", [])))
    if dist.get_rank() != 0:
        return None
    return RunRecord(
        settings=settings,
        modules=modules,
        steps=step_records(sch.journal.steps),
        stage_paths=[stage.paths for stage in stages],
        ranks=[rank for rank, _ in gathered],
        timeline=[event for _, events in gathered for event in events],
    )


MAX_TABLE_ROWS = 50
"""Longest table of losses; longer runs show every so many steps."""


def print_header(console: Console, settings: Settings, source: str) -> None:
    """Print model, batch, layout and data of the run."""
    layout = f"pp {settings.pp} x dp {settings.dp} x tp {settings.tp}"
    ranks, layers = format_count(settings.world_size, "rank"), format_count(settings.layers, "layer")
    model = f"{settings.model}: {layers}, hidden {settings.hidden}, {format_count(settings.heads, 'head')}"
    parts = format_count(settings.microbatches, "micro-batch", "micro-batches")
    batch = f"batch {settings.batch} x {settings.seq} bytes, {parts}"
    run = f"{batch}; {ranks} ({layout}) on {settings.device}"
    console.print(f"[bold]{escape(model)}[/]; {run}", highlight=False, soft_wrap=True)
    console.print(f"data: {escape(source)}", highlight=False, soft_wrap=True)


def with_progress(console: Console, title: str, losses: Iterable[float], num_steps: int) -> Iterator[float]:
    """Pass the losses on, and show them: a live bar on a terminal, else about ten lines."""
    if not console.is_terminal:
        yield from _lines(console, title, losses, num_steps)
        return
    title_column, loss_column = TextColumn("{task.description}"), TextColumn("{task.fields[loss]}")
    columns = (title_column, BarColumn(), MofNCompleteColumn(), loss_column, TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=num_steps, loss="")
        for loss in losses:
            progress.update(task, advance=1, loss=f"loss {loss:.4f}")
            yield loss


def _lines(console: Console, title: str, losses: Iterable[float], num_steps: int) -> Iterator[float]:
    every = max(1, num_steps // 10)
    for step, loss in enumerate(losses, 1):
        if step == 1 or step % every == 0 or step == num_steps:
            console.print(f"{title}: step {step}/{num_steps}, loss {loss:.4f}", highlight=False, soft_wrap=True)
        yield loss


def print_comparison(console: Console, record: RunRecord) -> None:
    """Print both losses of each step, their difference, and the verdict; a bad one is the error that the run then ends with."""
    table = Table("step", "scheduled", "reference", "difference", title="loss")
    for column in table.columns:
        column.justify = "right"
    every = -(-len(record.losses) // MAX_TABLE_ROWS)
    for step, (own, other) in enumerate(zip(record.losses, record.reference, strict=True), 1):
        if step % every == 0 or step in (1, record.largest_difference[1]):
            table.add_row(str(step), f"{own:.6f}", f"{other:.6f}", f"{abs(own - other):.1e}")
    console.print(table)
    if not record.is_refuted:
        console.print(verdict(record), highlight=False, soft_wrap=True)


def verdict(record: RunRecord) -> str:
    """Return the sentence that says whether the losses agree."""
    value, step = record.largest_difference
    largest = f"largest difference {value:.1e}, at step {step}"
    if record.settings.dropout:
        return f"{largest}; not judged, as with dropout the two runs draw different masks"
    word = "the same within" if record.is_within_tolerance else "NOT the same: above"
    return f"{largest}: {word} {record.settings.tolerance:.0e}"
