"""``slapo verify``: whether a schedule leaves a model what it was, and which step does not."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from slapo.training.failures import InterruptedRunError, RankError
from slapo.training.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the command to the ``slapo`` command line."""
    app.command("verify")(verify)


def verify(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Option(help="Transformers model type with a language model, e.g. gpt2, llama, t5.", metavar="TYPE")
    ] = "gpt2",
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 2,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 64,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 32,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 4,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    schedule: Annotated[
        str,
        typer.Option(
            help="Python file with `def schedule(sch)`, or a saved .json; default: made from the model's structure.",
            metavar="FILE",
            show_default=False,
        ),
    ] = "",
    checkpoint_layers: Annotated[
        bool, typer.Option("--checkpoint-layers", help="Recompute each layer in the backward pass.")
    ] = False,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Split the sequence too, between the layers that --tp splits.")
    ] = False,
    level: Annotated[
        Literal["outputs", "grads", "step"],
        typer.Option(help="How far to compare: outputs; the loss and all gradients too; an optimizer's step too."),
    ] = "grads",
    dtype: Annotated[Literal["fp64", "fp32", "bf16"], typer.Option(help="Type of the parameters.")] = "fp32",
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: GPUs when there is one for every rank.")
    ] = "auto",
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
