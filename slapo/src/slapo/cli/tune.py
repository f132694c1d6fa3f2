"""``slapo tune``: search the fastest schedule of a model or the fastest configuration of a training script."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from ..run_data.settings import Settings, SettingsError
from . import flags
from .schedule_flags import given_flags, saved_options, with_schedule_values

_SETTINGS = ("model", "layers", "hidden", "heads", "seq", "batch", "tp", "pp", "dp", "target", "seed", "device", "precision")
"""Flags that are settings of ``slapo train`` too."""

_SEARCH = {"db", "trials", "timeout", "seconds", "sampler", "pruner", "save", "report", "seed"}
_TAKEN = {
    "the classic tuner (--config)": {"config", "db", "error_stop", "timeout"},
    "a tuned script": {"schedule", *_SEARCH},
    "a model with a schedule file": {"schedule", "no_verify", *_SEARCH, *_SETTINGS},
    "a model without a schedule file": {"ranks", "hardware", "no_verify", *_SEARCH, *_SETTINGS},
}
"""Flags of each subject of a tuning."""


def tune(
    ctx: typer.Context,
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT ARGS...",
            help="Training script with its arguments, which prints its throughput; default: train --model TYPE|DIR.",
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
            help="Python file with `def space(space)` and `def schedule(sch, space)`; default with --model: the layouts of "
            "`slapo plan` for --ranks.",
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
        str,
        typer.Option(
            help="Transformers model type, e.g. gpt2, or a folder with a config.json, instead of SCRIPT.",
            metavar="TYPE|DIR",
            show_default=False,
        ),
    ] = "",
    ranks: Annotated[
        int, typer.Option(help="Ranks to lay out without a schedule file; 0: --tp x --pp x --dp, which are constraints.")
    ] = 0,
    hardware: Annotated[
        str,
        typer.Option(help="Hardware of the plan, as for `slapo plan`, e.g. a file of its --calibrate.", metavar="NAME|FILE"),
    ] = "this-machine",
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
    precision: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Precision of the computation.")] = "fp32",
) -> None:
    """Search the fastest schedule of a model (--model), or the fastest configuration of a training script (SCRIPT).

    Use --model alone to choose the layout: `slapo plan` lists what fits, and trials correct its order. Use --model with
    --schedule to search steps of your own, SCRIPT with --schedule to search steps in a training loop of your own, and SCRIPT
    with --config to search what is no schedule.

    With --model every trial trains a few steps on processes of its own, and the best is verified. A script gets the values of a
    trial as arguments and in its environment. With --config the classic tuner runs a script with every configuration. The exit
    status is 0 if there is a best, 1 if no trial had a throughput, 2 for what cannot be used, and 128 plus the signal's number
    after Ctrl-C.
    """
    given = given_flags(ctx) - {"script"}
    _check_flags(given, bool(script))
    if config:
        from slapo_tune.command import main  # noqa: PLC0415 - seconds that --help need not wait

        arguments = ["--config", config, *(["--db", db] if db else []), "--error-stop", error_stop, "--timeout", timeout]
        raise typer.Exit(main([*arguments, *(script or [])], "slapo tune"))
    options: dict[str, Any] = {"trials": trials, "timeout": _seconds(timeout), "seconds": seconds or None}
    options |= {"database": db or None, "sampler": sampler, "pruner": pruner, "save": save, "page": report}
    if script:
        if model or not schedule:
            raise SettingsError("tune: a script needs --schedule FILE with its space, and no --model; or --config FILE")
        from slapo_tune.command import tune_script  # noqa: PLC0415

        raise typer.Exit(tune_script(script, schedule, seed=seed, **options))
    params = with_schedule_values(ctx)
    if not params["model"]:
        raise SettingsError("tune: nothing to tune; give --model TYPE, or --schedule FILE SCRIPT, or --config FILE SCRIPT")
    settings = Settings(**{name: params[name] for name in _SETTINGS}, schedule=schedule, microbatches=1)
    constraints: dict[str, Any] = {axis: ctx.params[axis] for axis in ("tp", "pp", "dp") if axis in given}
    from ..training.tune_run import run_tuning  # noqa: PLC0415

    built = saved_options(schedule) if schedule else {}
    if "precision" in given or not schedule and precision != "fp32":
        built["precision"] = precision
    options |= {"options": built, "verify": not no_verify}
    raise typer.Exit(run_tuning(settings, ranks, hardware, constraints, **options))


def _check_flags(given: set[str], is_script: bool) -> None:
    """Refuse flags that the subject of the tuning does not take."""
    names = [*_TAKEN]
    which = 0 if "config" in given else 1 if is_script else 2 if "schedule" in given else 3
    if is_script and "model" in given:
        raise SettingsError("tune: a script needs --schedule FILE with its space, and no --model; or --config FILE")
    if others := sorted(given - _TAKEN[names[which]]):
        flag = others[0].replace("_", "-")
        takers = [name for name, taken in _TAKEN.items() if others[0] in taken]
        raise SettingsError(f"--{flag}: {names[which]} does not take it, but {' and '.join(takers)}; leave it out")


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise SettingsError(f"--timeout {text}: not a number of seconds; use one from 0 on")
    return seconds or None
