"""``slapo tune``: search the fastest schedule of a model or the fastest configuration of a training script."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from ..run_data.settings import Settings, SettingsError
from . import flags

_SETTINGS = ("layers", "hidden", "heads", "seq", "batch", "tp", "pp", "dp", "target", "seed", "device")
"""Flags that are settings of ``slapo train`` too."""


def tune(
    ctx: typer.Context,
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT ARGS...",
            help="Training script with its arguments, which prints its throughput; default: train --model TYPE.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str,
        typer.Option(
            help="Classic tuner: Python file with update_space or get_bs_range. It runs SCRIPT with every configuration; only "
            "--db, --error-stop and --timeout go with it.",
            metavar="FILE",
            show_default=False,
        ),
    ] = "",
    schedule: Annotated[
        str,
        typer.Option(
            help="Python file with `def space(space)` and `def schedule(sch, space)`; default with --model: layouts of "
            "--ranks, micro-batches, and recomputed layers.",
            metavar="FILE",
            show_default=False,
        ),
    ] = "",
    db: Annotated[
        str,
        typer.Option(
            help="JSON file of results, or the URL of an Optuna storage; the same command goes on there, and several share the "
            "trials.",
            metavar="FILE",
            show_default=False,
        ),
    ] = "",
    trials: Annotated[int, typer.Option(help="Trials, with those in --db.")] = 20,
    timeout: Annotated[str, typer.Option(help="Seconds after which a trial is killed; 0: never.", metavar="S")] = "3600",
    seconds: Annotated[float, typer.Option(help="Seconds after which no trial is started; 0: any.")] = 0.0,
    sampler: Annotated[
        Literal["plan", "tpe", "random"], typer.Option(help="Choice of the next configuration; the last two are Optuna's.")
    ] = "plan",
    pruner: Annotated[
        Literal["interval", "median", "hyperband", "none"],
        typer.Option(help="What stops a slow trial: its interval, clear of the best; or a pruner of Optuna."),
    ] = "interval",
    save: Annotated[str, typer.Option(help="Write the best as a schedule file.", metavar="FILE", show_default=False)] = "",
    report: Annotated[
        str, typer.Option(help="Write a page with trials, best so far and importances.", metavar="FILE", show_default=False)
    ] = "",
    error_stop: Annotated[
        str, typer.Option(help="Classic tuner: none, symbol or all; what a failed trial ends.", metavar="WHAT")
    ] = "none",
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not verify the best.")] = False,
    model: Annotated[
        str, typer.Option(help="Transformers model type, e.g. gpt2, instead of SCRIPT.", metavar="TYPE", show_default=False)
    ] = "",
    ranks: Annotated[int, typer.Option(help="Ranks to lay out; 0: --tp x --pp x --dp.")] = 0,
    layers: flags.Layers = 4,
    hidden: flags.Hidden = 64,
    heads: flags.Heads = 4,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences in an optimizer step, over all ranks.")] = 8,
    tp: flags.TensorParallel = 1,
    pp: flags.PipelineRanks = 1,
    dp: flags.DataParallelRanks = 1,
    target: Annotated[str, typer.Option(help="Engine to train with; `slapo dialects` lists them.")] = "torch",
    seed: Annotated[int, typer.Option(help="Seed of weights, tokens and the search.")] = 0,
    device: flags.Device = "auto",
) -> None:
    """Search the fastest schedule of a model (--model), or the fastest configuration of a training script (SCRIPT).

    With --model every trial trains a few steps on processes of its own, and the best is verified. A script gets the values of a
    trial as arguments and in its environment. With --config the classic tuner runs a script with every configuration. The exit
    status is 0 if there is a best, 1 if no trial had a throughput, 2 for what cannot be used, and 128 plus the signal's number
    after Ctrl-C.
    """
    if config:
        from slapo_tune.command import main  # noqa: PLC0415 - seconds that --help need not wait

        given = ["--config", config, *(["--db", db] if db else []), "--error-stop", error_stop, "--timeout", timeout]
        raise typer.Exit(main([*given, *(script or [])], "slapo tune"))
    options: dict[str, Any] = {"trials": trials, "timeout": _seconds(timeout), "seconds": seconds or None}
    options |= {"database": db or None, "sampler": sampler, "pruner": pruner, "save": save, "page": report}
    if script:
        if model or not schedule:
            raise SettingsError("tune: a script needs --schedule FILE with its space, and no --model; or --config FILE")
        from slapo_tune.command import tune_script  # noqa: PLC0415

        raise typer.Exit(tune_script(script, schedule, seed=seed, **options))
    if not model:
        raise SettingsError("tune: nothing to tune; give --model TYPE, or --schedule FILE SCRIPT, or --config FILE SCRIPT")
    values = {name: ctx.params[name] for name in _SETTINGS} | {"model": model, "schedule": schedule, "microbatches": 1}
    from ..training.tune_run import run_tuning  # noqa: PLC0415

    raise typer.Exit(run_tuning(Settings(**values), ranks, verify=not no_verify, **options))


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise SettingsError(f"--timeout {text}: not a number of seconds; use one from 0 on")
    return seconds or None
