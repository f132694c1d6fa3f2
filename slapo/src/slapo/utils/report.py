"""Reports of memory and time, and FLOPs."""

import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median_high
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from slapo_core import split_inputs

_MIB = 2**20


def report_memory(msg: str = "", report_gc: bool = False) -> int:
    """Print the memory in use and its peak.

    Args:
        msg: Prefix of the line.
        report_gc: Whether to collect garbage first and to print every tensor that is left.

    Returns:
        Bytes in use: allocated by torch on the current GPU, or, without a GPU, resident memory of the process.
    """
    if report_gc:
        gc.collect()
    if torch.cuda.is_available():
        where, used, most = "GPU", torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    else:
        where, (used, most) = "CPU", _cpu_memory()
    _print_on_first_rank(f"{f'{msg}: ' if msg else ''}{where} memory {used / _MIB:.1f} MiB, at most {most / _MIB:.1f} MiB")
    if report_gc:
        for tensor in [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]:
            _print_on_first_rank(f"{type(tensor).__name__} {list(tensor.shape)} {tensor.dtype} on {tensor.device}")
    return used


class Times(NamedTuple):
    """Seconds of one run, the median of several.

    Args:
        forward: Seconds of the forward.
        backward: Seconds of the backward; None if it was not run.
    """

    forward: float
    backward: float | None


def report_time(model: nn.Module, inputs: Any, backward: bool = False, repeat: int = 5) -> Times:
    """Print the time of a model's run, after one warm-up run; its gradients are restored.

    Args:
        model: The model, which runs in its present mode.
        inputs: A dict of keyword arguments, a tuple or list of positional ones, or a single argument.
        backward: Whether to run the backward of the sum of all outputs that require a gradient.
        repeat: Number of timed runs.

    Raises:
        ValueError: ``repeat`` is below 1, or no output has a gradient.
    """
    if repeat < 1:
        raise ValueError(f"repeat is {repeat}; give at least 1")
    with _gradients_kept(model):
        forward, back = zip(*(_forward_backward_seconds(model, inputs, backward) for _ in range(repeat + 1)), strict=True)
    times = Times(median_high(forward[1:]), median_high(back[1:]) if backward else None)
    behind = "" if times.backward is None else f", backward {times.backward * 1e3:.2f} ms"
    _print_on_first_rank(f"{type(model).__name__}: forward {times.forward * 1e3:.2f} ms{behind}, the median of {repeat}")
    return times


def profile_perf(model: nn.Module, inputs: Any, backward: bool = False, row_limit: int = 100) -> str:
    """Print the slowest operators of one run, by torch's profiler; arguments as in ``report_time``.

    Returns:
        The table.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with _gradients_kept(model), profile(activities=activities, record_shapes=True) as found:
        _forward_backward_seconds(model, inputs, backward)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    table: str = found.key_averages().table(sort_by=f"{kind}_time_total", row_limit=row_limit)
    _print_on_first_rank(table)
    return table


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """Restore the gradients at the end of the block."""
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    try:
        yield
    finally:
        for parameter, grad in gradients.items():
            parameter.grad = grad


def _forward_backward_seconds(model: nn.Module, inputs: Any, backward: bool) -> tuple[float, float]:
    args, kwargs = split_inputs(inputs)
    for parameter in model.parameters() if backward else ():
        parameter.grad = None
    out, forward = _seconds(lambda: model(*args, **kwargs))
    if not backward:
        return forward, 0.0
    values = [out.to_tuple() if hasattr(out, "to_tuple") else out]
    totals = [leaf.sum() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not totals:
        raise ValueError(f"no output of {type(model).__name__} has a gradient; leave backward out")
    return forward, _seconds(lambda: torch.autograd.backward(totals))[1]


def _seconds(run: Callable[[], Any]) -> tuple[Any, float]:
    _wait()
    start = time.perf_counter()
    found = run()
    _wait()
    return found, time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _cpu_memory() -> tuple[int, int]:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux
        used = most
    return used, max(used, most)


def _print_on_first_rank(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


__all__ = ["decoder_flops", "profile_perf", "report_memory", "report_time"]


def decoder_flops(
    batch_size: int,
    seq_len: int,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    *,
    intermediate_size: int | None = None,
    gated_mlp: bool = False,
    kv_share: float = 1.0,
    ckpt_ratio: float = 0.0,
    backward: bool = True,
) -> int:
    """Return the FLOPs of one iteration of a decoder with a language-model head, counting matrix products only.

    A multiply-add counts as two. Attention counts the whole sequence for each position, as is usual. The backward counts twice
    the forward.

    Args:
        batch_size: Sequences per iteration, over all ranks.
        seq_len: Length of each sequence.
        num_layers: Number of layers of attention and MLP.
        hidden_size: Width of the hidden states.
        vocab_size: Rows of the head.
        intermediate_size: Width inside the MLP; default: four times ``hidden_size``.
        gated_mlp: Whether the MLP has three matrices, as in Llama, rather than two, as in GPT-2.
        kv_share: Key heads per query head: 1/4 if four query heads share one.
        ckpt_ratio: Share of the layers that are recomputed in the backward.
        backward: Whether the iteration has a backward; False for an evaluation.

    Raises:
        ValueError: a size below 1, or a share outside 0 to 1.
    """
    inner = 4 * hidden_size if intermediate_size is None else intermediate_size
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "num_layers": num_layers, "hidden_size": hidden_size}
    for name, size in {**sizes, "vocab_size": vocab_size, "intermediate_size": inner}.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; give a size of at least 1")
    for name, share in {"kv_share": kv_share, "ckpt_ratio": ckpt_ratio}.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name} is {share}; give a share from 0 to 1")
    tokens = batch_size * seq_len
    weights = (2 + 2 * kv_share) * hidden_size**2 + (3 if gated_mlp else 2) * hidden_size * inner
    layers = num_layers * 2 * tokens * (weights + 2 * seq_len * hidden_size)
    head = 2 * tokens * hidden_size * vocab_size
    return round(3 * (layers + head) + ckpt_ratio * layers if backward else layers + head)
