"""Time of ``build`` for a model with 24 layers, beside the engine's own start."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.peers.models import adamw, mesh_of
from slapo_core import build, create_schedule

LAYERS, HIDDEN, ROWS, SEQUENCE = 24, 512, 4, 128
STARTS = {
    "deepspeed": (("deepspeed", "initialize"), ("deepspeed.pipe:PipelineModule", "__init__")),
    "megatron": (
        ("megatron.core.parallel_state", "initialize_model_parallel"),
        ("megatron.core.distributed:DistributedDataParallel", "__init__"),
        ("megatron.core.optimizer.optimizer:FP32Optimizer", "__init__"),
    ),
}
"""Functions of each engine itself that ``build`` calls, as module and name."""


class Seconds(NamedTuple):
    """Seconds of one rank."""

    schedule: float
    build: float
    engine: float


def gpt2(layers: int = LAYERS) -> nn.Module:
    """With weights, and a small vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 1024, "n_positions": SEQUENCE, "n_embd": HIDDEN, "n_head": 8, "n_layer": layers}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    given = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLMLoss"}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, **given))


def measure_build(rank: int, target: str, axis: str) -> Seconds:
    """Seconds of this rank for the first schedule of this process, with the engine imported."""
    torch.set_num_threads(1)
    _imported(target)
    model, mesh = gpt2(), mesh_of(axis)
    ids = torch.zeros(ROWS, SEQUENCE, dtype=torch.long)
    start = time.perf_counter()
    schedule = create_schedule(model, mesh=mesh, example_inputs={"input_ids": ids, "labels": ids})
    schedule.tensor_parallel() if axis == "tp" else schedule.pipeline()
    middle = time.perf_counter()
    dist.barrier()
    with _clocked(STARTS[target]) as clock, redirect_stdout(io.StringIO()):
        begin = time.perf_counter()
        build(schedule, target, optimizer=adamw, microbatches=ROWS)
        end = time.perf_counter()
    return Seconds(middle - start, end - begin, clock.seconds)


def _imported(target: str) -> None:
    if target == "deepspeed":
        from slapo_deepspeed.process_state.engine_import import start

        start("cpu")
    else:
        from slapo_training.engines import without_warnings

        with without_warnings():
            import megatron.core.distributed
            import megatron.core.optimizer
            import megatron.core.pipeline_parallel  # noqa: F401


class _Clock:
    """Adds up the seconds of calls; one inside of another counts once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.perf_counter() - start


@contextmanager
def _clocked(functions: tuple[tuple[str, str], ...]) -> Iterator[_Clock]:
    """Time these functions inside."""
    clock = _Clock()
    with ExitStack() as stack:
        for place, name in functions:
            owner = resolve_name(place)
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, _through(clock, original))
        yield clock


def _through(clock: _Clock, original: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        return clock.call(original, *args, **kwargs)

    return timed
