"""``slapo verify``: compare a schedule, or an engine with it, with the unmodified model, and name the faulty step."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from ..run_data.settings import Settings, SettingsError
from . import flags
from .schedule_flags import with_schedule_values

_OWN = ("level", "dtype", "against", "clip", "processes", "as_json")
"""Flags that ``slapo train`` lacks."""


def verify(
    ctx: typer.Context,
    model: flags.Model = "gpt2",
    layers: flags.Layers = 2,
    hidden: flags.Hidden = 64,
    heads: flags.Heads = 4,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 32,
    batch: Annotated[int, typer.Option(help="Sequences, over all data-parallel ranks.")] = 4,
    tp: flags.TensorParallel = 1,
    pp: flags.PipelineRanks = 1,
    dp: flags.DataParallelRanks = 1,
    target: Annotated[
        str,
        typer.Option(
            help="Verify a training step of this engine; `slapo dialects` lists them; default: the schedule alone, or torch "
            "where --pp or --dp is more than 1.",
            show_default=False,
        ),
    ] = "",
    against: Annotated[str, typer.Option(help="Another engine, compared with --target too.", show_default=False)] = "",
    microbatches: Annotated[
        int, typer.Option(help="Parts an engine cuts each rank's share of the batch into; 0: as many as it has pipeline ranks.")
    ] = 0,
    schedule: flags.ScheduleFile = "",
    checkpoint_layers: flags.CheckpointLayers = False,
    sequence_parallel: flags.SequenceParallel = False,
    schedule_kind: flags.ScheduleKind = "1f1b",
    data_parallel: flags.DataParallel = "ddp",
    clip: Annotated[
        float, typer.Option(help="Largest gradient norm, of the engine and of the unmodified model; 0: any.")
    ] = 0.0,
    level: Annotated[
        Literal["outputs", "grads", "step"],
        typer.Option(
            help="How far to compare: outputs; the loss and all gradients too; a step of an optimizer too, as with engines."
        ),
    ] = "grads",
    dtype: Annotated[
        Literal["fp64", "fp32", "bf16", "fp16"],
        typer.Option(help="Type of the parameters, fp64, fp32 or bf16; with an engine its precision, fp32, bf16 or fp16."),
    ] = "fp32",
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    device: flags.Device = "auto",
    processes: Annotated[
        bool,
        typer.Option(
            "--processes", help="A process for every rank; default: threads of this one, on CPUs and without an engine."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Compare a scheduled model with the unmodified one, and name the step to blame where they differ.

    With --target, or several pipeline or data-parallel ranks, a training step of an engine with it, and name the engine, its
    option or the step to blame. Both models have random weights and get random tokens. The exit status is 0 where all is the
    same and 1 where something differs.
    """
    given = with_schedule_values(ctx)
    given["target"] = target or ("torch" if given["pp"] > 1 or given["dp"] > 1 or against else "")
    given["microbatches"] = given["microbatches"] or (given["pp"] if given["target"] else 1)
    sizes = {name: value for name, value in given.items() if name not in _OWN}
    engines = [name for name in (given["target"], against) if name]
    for name in engines or ["torch"]:
        kept = given["data_parallel"] if name == "torch" or "torch" not in engines else "ddp"  # of two engines the torch one's
        Settings(**{**sizes, "target": name, "data_parallel": kept}).check()
    _check(given)
    from ..training.verify_run import VerifySettings, run_verification  # noqa: PLC0415 - as in train

    verdict = run_verification(VerifySettings(**given))
    typer.echo(verdict.report)
    if not verdict.ok:
        raise typer.Exit(1)


def _check(given: dict[str, Any]) -> None:
    """Raise ``SettingsError`` for values of the flags that ``slapo train`` lacks."""
    engine, dtype = given["target"], given["dtype"]
    if engine and dtype == "fp64":
        raise SettingsError("--dtype fp64: engines have no such precision; use fp32, bf16 or fp16, or leave --target out")
    if not engine and dtype == "fp16":
        raise SettingsError("--dtype fp16: only of engines; use fp64, fp32 or bf16, or give --target")
    if not engine and given["clip"]:
        raise SettingsError(f"--clip {given['clip']}: nothing clips gradients without an engine; give --target")
    if given["against"] and given["against"] == engine:
        raise SettingsError(f"--against {engine}: that is the target itself; name another engine")
