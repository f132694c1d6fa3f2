"""``slapo plan``: the fastest layouts of a model on a cluster that need not exist, and why others do not fit."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ..run_data.settings import SettingsError
from . import flags
from .schedule_flags import given_flags, with_schedule_values

Ranks = typer.Option(help="Only layouts with this number.", show_default=False)


def plan(
    ctx: typer.Context,
    model: flags.Model = "gpt2",
    layers: flags.Layers = 4,
    hidden: flags.Hidden = 64,
    heads: flags.Heads = 4,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 128,
    gpus: Annotated[int, typer.Option(help="Number of devices; with --fit the largest; 0: 1, or 16384 with --fit.")] = 0,
    hardware: Annotated[
        str, typer.Option(help="Ready hardware, e.g. h100, or a .toml file, as --calibrate writes it.", metavar="NAME|FILE")
    ] = "this-machine",
    global_batch: Annotated[
        int, typer.Option(help="Sequences in an optimizer step, over all devices; 0: as many as devices.")
    ] = 0,
    target: Annotated[str, typer.Option(help="Engine to plan for; `slapo dialects` lists them.")] = "torch",
    precision: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Precision of the computation.")] = "fp32",
    tp: Annotated[int | None, Ranks] = None,
    pp: Annotated[int | None, Ranks] = None,
    dp: Annotated[int | None, Ranks] = None,
    rows: Annotated[int | None, typer.Option(help="Only micro-batches of this many sequences.", show_default=False)] = None,
    data_parallel: Annotated[
        str | None,
        typer.Option(help="Only this kind of data parallelism: ddp, fsdp, or of another engine.", show_default=False),
    ] = None,
    pipeline_schedule: Annotated[
        str | None, typer.Option(help="Only this pipeline schedule, such as 1f1b, interleaved or zbv.", show_default=False)
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option("--sequence-parallel/--no-sequence-parallel", help="Only with, or without it.", show_default=False),
    ] = None,
    parallel_loss: Annotated[
        bool | None, typer.Option("--parallel-loss", help="Compute the loss from each rank's part of the logits.")
    ] = None,
    kernels: Annotated[
        bool | None, typer.Option("--kernels", help="Take use_kernels(), whose eager forms are estimated.")
    ] = None,
    top: Annotated[int, typer.Option(help="Number of layouts to print.")] = 10,
    check: Annotated[int, typer.Option(help="Number of best layouts whose real schedule is estimated.")] = 1,
    save: Annotated[
        str, typer.Option(help="Write the best for `slapo train --schedule`.", metavar="FILE.py", show_default=False)
    ] = "",
    report: Annotated[str, typer.Option(help="Write a page on the best.", metavar="FILE.html", show_default=False)] = "",
    fit: Annotated[bool, typer.Option("--fit", help="Find the least number of devices, 1, 2, 4 and so on.")] = False,
    max_seq: Annotated[bool, typer.Option("--max-seq", help="Find the longest sequence that fits.")] = False,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="Find the largest micro-batch that fits.")] = False,
    calibrate: Annotated[
        str,
        typer.Option(
            help="Measure this machine, write the file for --hardware, and end.", metavar="FILE.toml", show_default=False
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of a table.")] = False,
) -> None:
    """Plan a training: the layouts that fit the devices' memory, the fastest first, in one process without any of the devices.

    The exit status is 0 where a layout fits, 1 where none does, and 2 where the flags contradict each other or a file cannot be
    written.
    """
    named = given_flags(ctx)
    if calibrate:
        if others := sorted(named - {"calibrate", "gpus"}):
            flag = "json" if others[0] == "as_json" else others[0].replace("_", "-")
            raise SettingsError(f"--{flag}: --calibrate measures this machine and plans nothing; leave one of them out")
        from ..training.plan_run import run_calibration  # noqa: PLC0415 - as in train

        typer.echo(run_calibration(calibrate, gpus))
        return
    given = with_schedule_values(ctx)
    from ..training.plan_run import PlanSettings, run_plan  # noqa: PLC0415

    answer = run_plan(PlanSettings.of(given, named))
    typer.echo(answer.text)
    if answer.problem:
        typer.echo(f"slapo: {answer.problem}", err=True)
        raise typer.Exit(2)
    if not answer.fits:
        raise typer.Exit(1)
