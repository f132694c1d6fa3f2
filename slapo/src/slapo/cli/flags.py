"""Flags that several commands have."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Model = Annotated[
    str,
    typer.Option(
        help="Transformers model type with a language model, e.g. gpt2, llama, t5, or a folder with a config.json, whose sizes "
        "and, to train, weights are taken.",
        metavar="TYPE|DIR",
    ),
]
Layers = Annotated[int, typer.Option(help="Number of layers.")]
Hidden = Annotated[int, typer.Option(help="Hidden size.")]
Heads = Annotated[int, typer.Option(help="Attention heads.")]
TensorParallel = Annotated[int, typer.Option(help="Tensor-parallel ranks.")]
ScheduleFile = Annotated[
    str,
    typer.Option(
        help="Python file with `def schedule(sch)`, or `(sch, space)`, or a saved .json; default: by the model's structure. A "
        "file of `slapo plan --save` also sets the flags that are left out.",
        metavar="FILE",
        show_default=False,
    ),
]
CheckpointLayers = Annotated[bool, typer.Option("--checkpoint-layers", help="Recompute each layer in the backward pass.")]
SequenceParallel = Annotated[
    bool, typer.Option("--sequence-parallel", help="Split the sequence too, between the layers that --tp splits.")
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: GPUs when there is one for every rank.")]
PipelineRanks = Annotated[int, typer.Option(help="Pipeline ranks; each runs one stage, or two with most kinds of schedules.")]
DataParallelRanks = Annotated[int, typer.Option(help="Data-parallel ranks.")]
ScheduleKind = Annotated[
    Literal["1f1b", "gpipe", "interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev"],
    typer.Option(help="Order of the micro-batches in the pipeline; all but the first two have two stages on each rank."),
]
DataParallel = Annotated[
    Literal["ddp", "fsdp"],
    typer.Option(help="What a data-parallel rank keeps: all parameters, or, with FSDP2, its rows of each."),
]
