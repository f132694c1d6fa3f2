"""``slapo verify``: whether a schedule leaves a model what it was, and which step does not."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from slapo.training.failures import InterruptedRunError, RankError
from slapo.training.settings import Settings

from .flags import CheckpointLayers, Device, Heads, Hidden, Layers, Model, ScheduleFile, SequenceParallel, TensorParallel


def register(app: typer.Typer) -> None:
    """Add the command to the ``slapo`` command line."""
    app.command("verify")(verify)


def verify(
    ctx: typer.Context,
    model: Model = "gpt2",
    layers: Layers = 2,
    hidden: Hidden = 64,
    heads: Heads = 4,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 32,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 4,
    tp: TensorParallel = 1,
    schedule: ScheduleFile = "",
    checkpoint_layers: CheckpointLayers = False,
    sequence_parallel: SequenceParallel = False,
    level: Annotated[
        Literal["outputs", "grads", "step"],
        typer.Option(help="How far to compare: outputs; the loss and all gradients too; an optimizer's step too."),
    ] = "grads",
    dtype: Annotated[Literal["fp64", "fp32", "bf16"], typer.Option(help="Type of the parameters.")] = "fp32",
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Compare a scheduled model with the unmodified one, and name the step to blame where they differ.

    Both have random weights and get random tokens. The exit status is 0 where all is the same and 1 where something differs.
    """
    sizes = {name: value for name, value in ctx.params.items() if name not in ("level", "dtype", "as_json")}
    Settings(**sizes, microbatches=1).check()
    from slapo.training.verifying import VerifySettings, run  # noqa: PLC0415 - as in train

    try:
        verdict = run(VerifySettings(**ctx.params, microbatches=1))
    except (RankError, InterruptedRunError) as err:
        typer.echo(f"{err.traceback}slapo: {err}", err=True)
        raise typer.Exit(err.exit_code) from None
    typer.echo(verdict.report)
    if not verdict.ok:
        raise typer.Exit(1)
