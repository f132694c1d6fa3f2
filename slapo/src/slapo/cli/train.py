"""``slapo train``: train a language model on real text with tensor, pipeline and data parallelism."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ..run_data.saved_schedule import other_build_options
from ..run_data.settings import TOLERANCES, Settings
from . import flags
from .schedule_flags import with_schedule_values

REFERENCE = (
    "Train the unmodified model in one process as well, and compare: with exit status 1 when, without dropout, the loss of a "
    f"step differs by more than {TOLERANCES['fp32']:g} ({TOLERANCES['bf16']:g} with bf16)."
)


def train(
    ctx: typer.Context,
    model: flags.Model = "gpt2",
    layers: flags.Layers = 4,
    hidden: flags.Hidden = 64,
    heads: flags.Heads = 4,
    seq: Annotated[int, typer.Option(help="Bytes in a sequence.")] = 128,
    dropout: Annotated[float, typer.Option(help="Dropout probability, everywhere in the model.")] = 0.0,
    batch: Annotated[int, typer.Option(help="Sequences in an optimizer step, over all ranks.")] = 8,
    microbatches: Annotated[int, typer.Option(help="Parts each rank's share of the batch is cut into.")] = 4,
    tp: flags.TensorParallel = 1,
    pp: flags.PipelineRanks = 1,
    dp: flags.DataParallelRanks = 1,
    target: Annotated[str, typer.Option(help="Engine to train with; `slapo dialects` lists them.")] = "torch",
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="File to read as bytes; may be given several times; default: the Python standard library's source.",
            metavar="FILE",
        ),
    ] = None,
    schedule: flags.ScheduleFile = "",
    checkpoint_layers: flags.CheckpointLayers = False,
    sequence_parallel: flags.SequenceParallel = False,
    schedule_kind: flags.ScheduleKind = "1f1b",
    data_parallel: flags.DataParallel = "ddp",
    precision: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Precision of the computation.")] = "fp32",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and dropout.")] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-3,
    device: flags.Device = "auto",
    reference: Annotated[bool, typer.Option("--reference", help=REFERENCE)] = False,
    report: Annotated[
        str,
        typer.Option(
            help="Write report.html, schedule.json and trace.json, a timeline for Perfetto, into this folder.",
            metavar="DIR",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Train a language model on bytes, with random initial weights, on the processes of this machine.

    Started by torchrun, as for several machines, it joins that world instead of starting processes of its own.
    """
    built = other_build_options(schedule) if schedule.endswith(".py") else {}
    settings = Settings(**{**with_schedule_values(ctx), "data": tuple(data or ()), "build_options": built})
    settings.check()
    from ..training.train_run import run_training  # noqa: PLC0415 - seconds that --help and a wrong flag need not wait

    run_training(settings)
