"""Reading a Llama of 2 GB at tp=4 into a model on the meta device, beside ``safetensors`` alone.

Run ``python -m benchmarks.weights``; it prints a section for ``benchmarks/README.md``. The model has random weights; it is
written by ``save_pretrained`` in files of at most 500 MB to a temporary folder, and removed with that. Four gloo ranks load at
once, each in a process of its own, from the page cache. The other side reads the same slices of the same tensors by
``get_slice`` of ``safe_open``, which maps the files into memory, copies them, and does nothing else. Turns of both follow each
other. ``check=False`` leaves out what ``build`` does beside: it would run the model once to see whether it is split rightly.

What was read is what the kernel counts of ``read`` calls during ``build`` (``rchar`` of ``/proc/self/io``), the files' headers
and all that Python imports then included; of mapped files it counts nothing. Memory is the highest resident set since before
``build`` (``VmHWM``, reset by ``clear_refs``), above what was resident then; pages of mapped files are part of it.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh

import slapo
from benchmarks.peers.rounds import in_new_processes
from slapo_core import parameter_facts, shard_spec

RANKS, TURNS, MIB = 4, 3, 2**20


def llama(small: bool) -> Any:
    """Class and config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 256 if small else 2048
    return LlamaForCausalLM, LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=32000,
    )


def write(rank: int, folder: str, small: bool) -> int:
    """Save a model; its bytes."""
    cls, config = llama(small)
    model = cls(config)
    model.save_pretrained(folder, max_shard_size="500MB")
    return sum(parameter.nbytes for parameter in model.parameters())


def status(key: str) -> int:
    """Bytes of a line of the process's status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def warm(folder: str) -> None:
    """Have the files in the page cache."""
    buffer = bytearray(MIB)
    for file in sorted(Path(folder).glob("*.safetensors")):
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def measured(folder: str, action: Callable[[], Any]) -> tuple[float, int, int]:
    """Seconds of the slowest rank; bytes read and peak of memory of this one."""
    gc.collect()
    if dist.get_rank() == 0:
        warm(folder)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    resident, read = status("VmRSS"), int(Path("/proc/self/io").read_text().split()[1])
    start = time.perf_counter()
    kept = action()
    seconds = torch.tensor(time.perf_counter() - start)
    read = int(Path("/proc/self/io").read_text().split()[1]) - read
    peak = status("VmHWM") - resident
    del kept
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item(), read, peak


def scheduled(small: bool) -> Any:
    """A model on the meta device, split."""
    cls, config = llama(small)
    with slapo.init_empty_weights():
        model = cls(config)
    sch = slapo.create_schedule(model, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)))
    sch.tensor_parallel()
    return sch


def slices(folder: str, wanted: list[tuple[str, int, list[tuple[int, int]]]]) -> list[torch.Tensor]:
    """Parts of tensors, by ``get_slice``."""
    found = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            for name, dim, ranges in wanted:
                if name in names:
                    lines: tuple[Any, ...] = (slice(None),) * dim
                    parts = [opened.get_slice(name)[lines + (slice(*each),)] for each in ranges]
                    found.append(parts[0].clone() if len(parts) == 1 else torch.cat(parts, dim))
    return found


def measure(rank: int, folder: str, small: bool) -> dict[str, Any]:
    """Return seconds, bytes read and peaks of both sides, and the bytes that this rank needs."""
    torch.set_num_threads(1)
    ours: list[Any] = []
    theirs: list[Any] = []
    for _ in range(TURNS):
        sch = scheduled(small)
        ours.append(measured(folder, lambda sch=sch: slapo.build(sch, check=False, weights=folder)))
        held = sch.root_module.named_parameters()
        whole = ((0, None),)
        specs = {parameter_facts(each).names[0]: shard_spec(each) for _, each in held}
        needs = sum(each.nbytes for each in sch.root_module.parameters())
        wanted = [(name, spec.dim, spec.ranges()) if spec else (name, 0, list(whole)) for name, spec in specs.items()]
        del sch, held
        theirs.append(measured(folder, lambda wanted=wanted: slices(folder, wanted)))
    return {"needs": needs, "ours": ours, "theirs": theirs}


def main() -> None:
    """Print the section; with ``--small`` of a small model."""
    small = "--small" in sys.argv[1:]
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
    with tempfile.TemporaryDirectory() as folder:
        (size,) = in_new_processes(write, 1, folder, small)
        ranks = in_new_processes(measure, RANKS, folder, small)
    needs = max(found["needs"] for found in ranks)
    read = max(one / found["needs"] for found in ranks for _, one, _ in found["ours"])
    peaks = {side: max(peak for found in ranks for _, _, peak in found[side]) / MIB for side in ("ours", "theirs")}
    times = {side: [seconds for seconds, _, _ in ranks[0][side]] for side in ("ours", "theirs")}
    ratio = median(one / other for one, other in zip(times["ours"], times["theirs"], strict=True))
    print(f"\n## Weights: a Llama of {size / MIB:.0f} MiB in fp32, read at tp={RANKS}, all ranks at once\n")
    print("| | a rank needs (MiB) | reads / needs | peak above the start (MiB) | that - 1/4 of the model (MiB) | s |")
    print("|---|---|---|---|---|---|")
    for side, told, count in (
        ("ours", "`build(sch, weights=folder)`", f"{read:.4f}"),
        ("theirs", "`get_slice` alone", "mapped"),
    ):
        over = peaks[side] - size / RANKS / MIB
        print(f"| {told} | {needs / MIB:.1f} | {count} | {peaks[side]:.1f} | {over:.1f} | {median(times[side]):.2f} |")
    print(
        f"\nRatio of the times: {ratio:.2f}. Bytes and peaks are the worst of ranks and turns, times medians of {TURNS} turns."
    )


if __name__ == "__main__":
    main()
