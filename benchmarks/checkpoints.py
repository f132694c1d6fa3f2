"""Saving an engine, and for how long that stops training, beside ``torch.distributed.checkpoint`` and the engines' own saves.

Run ``python -m benchmarks.checkpoints``; it prints a section for ``benchmarks/README.md``. Both sides write the same tensors of
the same ranks, flushed to the disk but for DeepSpeed's own; ours also takes SHA-256 sums of the files, and puts them in the
place of the checkpoint before. Turns of both are of one process, the other's last, as Megatron's forks, after which memory is
as slow as new; times are those of the slowest rank, medians of the turns.
"""

from __future__ import annotations

import queue
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.peers.rounds import in_new_processes
from benchmarks.sharding import blocks
from slapo_core import build, create_schedule
from slapo_training.distributed import all_reduce

HIDDEN, LAYERS, TURNS = 1024, 4, 7
ZERO = {"config": {"zero_optimization": {"stage": 1}}}
CASES: list[tuple[str, dict[str, int], dict[str, Any], str]] = [
    ("torch", {}, {}, "one process"),
    ("torch", {"pp": 2}, {}, "pp=2"),
    ("torch", {"tp": 2}, {}, "tp=2"),
    ("torch", {"dp": 2}, {}, "dp=2"),
    ("torch", {"dp": 2}, {"data_parallel": "fsdp"}, "dp=2, fsdp"),
    ("deepspeed", {}, {}, "DeepSpeed, one process"),
    ("deepspeed", {"tp": 2}, {}, "DeepSpeed, tp=2"),
    ("deepspeed", {"dp": 2}, ZERO, "DeepSpeed, dp=2, ZeRO-1"),
    ("megatron", {}, {}, "Megatron, one process"),
    ("megatron", {"tp": 2}, {}, "Megatron, tp=2"),
    ("megatron", {"dp": 2}, {"distributed_optimizer": True}, "Megatron, dp=2, distributed optimizer"),
]
Write = Callable[[Path], Any]


def engine_of(target: str, layout: dict[str, int], options: dict[str, Any], small: bool) -> tuple[Any, Any]:
    """An engine that has stepped, and its mesh."""
    hidden = HIDDEN // 8 if small else HIDDEN
    sizes = [layout.get(axis, 1) for axis in ("pp", "dp", "tp")]
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("pp", "dp", "tp"))
    x = torch.randn(2, 16, hidden, generator=torch.Generator().manual_seed(1))
    schedule = create_schedule(blocks(hidden, layers=LAYERS), mesh=mesh, example_inputs={"input": x[:1]})
    if sizes[2] > 1:
        schedule.tensor_parallel()
    if sizes[0] > 1:
        schedule.pipeline(sizes[0])
    adamw = partial(torch.optim.AdamW, lr=1e-4)
    engine = build(schedule, target, optimizer=adamw, loss_fn=F.mse_loss, microbatches=2, **options)
    engine.train_batch(input=x, labels=x)
    return engine, mesh


def seconds(action: Callable[[], Any], mesh: Any) -> float:
    """Return the seconds that the slowest rank takes."""
    dist.barrier()
    start = time.perf_counter()
    action()
    return float(all_reduce(torch.tensor(time.perf_counter() - start), mesh, dist.ReduceOp.MAX))


def staged_by_torch(engine: Any, layout: dict[str, int], options: dict[str, Any]) -> Write:
    """``dcp.async_save`` of the same, which returns when it has copied, and meets in a group of its own."""
    state, group = state_of(engine, layout, options), dist.new_group()
    return lambda folder: dcp.async_save(state, checkpoint_id=folder, process_group=group)  # type: ignore[attr-defined]


def state_of(engine: Any, layout: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors that this rank writes of a torch engine; the first replica writes replicated ones."""
    state: dict[str, Any] = {f"{dist.get_rank()} {name}": piece.tensor for name, piece in engine.pieces().items()}
    if layout.get("dp") and not options and dist.get_rank():
        state = {}
    for number, kept in enumerate(engine.optimizer.state.values() if state else ()):
        state |= {f"{dist.get_rank()} {number} {key}": value for key, value in kept.items()}
    return state


def written_alone(engine: Any, target: str, layout: dict[str, int], options: dict[str, Any]) -> Write:
    """Return a function of a folder that writes the same tensors without Slapo."""
    if target == "deepspeed":
        return lambda folder: engine.model.save_checkpoint(str(folder))
    if target == "megatron":
        return partial(written_by_megatron, engine)
    state = state_of(engine, layout, options)
    return lambda folder: dcp.save(state, checkpoint_id=folder)  # type: ignore[attr-defined]


def written_by_megatron(engine: Any, folder: Path) -> None:
    """``dist_checkpointing.save`` of the same state; its results are handed over in this process, not by one more."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from slapo_megatron.optimizer.local_tensors import LocalTensors
    from slapo_megatron.process_state.cpu_mode import cpu_mode

    filesystem_async._results_queue = queue.Queue()
    folder.mkdir(exist_ok=True)
    with cpu_mode():
        held = LocalTensors(engine.program)
        optimizer = engine.optimizer_state(held).sharded_state(engine.has_stepped, is_loading=False)
        dist_checkpointing.save({"model": held.sharded_tensors(held.tensors), "optimizer": optimizer}, str(folder))


def measure(
    rank: int, target: str, layout: dict[str, int], options: dict[str, Any], folder: str, small: bool
) -> dict[str, Any]:
    """MiB on the disk, and seconds of each way to save, and of a load."""
    torch.set_num_threads(1)
    engine, mesh = engine_of(target, layout, options, small)
    write = written_alone(engine, target, layout, options)
    staged = staged_by_torch(engine, layout, options) if target == "torch" else None
    found: dict[str, Any] = {"alone": [], "staged": [], "waits": [], "stops": [], "loads": []}
    for _ in range(TURNS):
        found["waits"].append(seconds(lambda: engine.save(f"{folder}/waits"), mesh))
        savings: list[Any] = []
        if staged is not None:
            found["staged"].append(seconds(partial(_kept, savings, partial(staged, Path(folder, "alone"))), mesh))
            savings.pop().result()
            _removed(Path(folder, "alone"))
        found["stops"].append(seconds(partial(_kept, savings, partial(engine.save, f"{folder}/stops", wait=False)), mesh))
        savings[0].wait()
        found["loads"].append(seconds(lambda: engine.load(f"{folder}/waits"), mesh))
    for _ in range(TURNS):
        found["alone"].append(seconds(partial(write, Path(folder, "alone")), mesh))
        _removed(Path(folder, "alone"))
    engine.close()
    found["size"] = sum(file.stat().st_size for file in Path(folder, "waits").rglob("*") if file.is_file()) / 2**20
    return found


def _removed(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()


def _kept(results: list[Any], action: Callable[[], Any]) -> None:
    results.append(action())


def first_and_later(times: list[float]) -> tuple[float, float]:
    """The first, and the median of the others, in ms."""
    return 1e3 * times[0], 1e3 * median(times[1:])


def main() -> None:
    """Print the section; with ``--small`` of a small model, and only of targets that are named."""
    small, asked = "--small" in sys.argv[1:], {each for each in sys.argv[1:] if not each.startswith("-")}
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
    print(f"\n## Checkpoints: {LAYERS} GPT blocks, hidden size {HIDDEN}, with AdamW's state, in fp32\n")
    print(
        "| layout | MiB | alone (ms) | `save` (ms) | `save` / alone | `save(wait=False)`: first, later (ms) "
        "| stops for, of a `save`: first, later | torch's `async_save`: first, later (ms) | `load` (ms) |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for target, layout, options, words in CASES:
        if asked and target not in asked:
            continue
        with tempfile.TemporaryDirectory() as folder:
            ranks = 2 if layout else 1
            found = in_new_processes(measure, ranks, target, layout, options, folder, small)[0]
        alone, waits, loads = (1e3 * median(found[key]) for key in ("alone", "waits", "loads"))
        first, later = first_and_later(found["stops"])
        torchs = "{:.0f}, {:.0f}".format(*first_and_later(found["staged"])) if found["staged"] else ""
        print(
            f"| {words} | {found['size']:.0f} | {alone:.0f} | {waits:.0f} | {waits / alone:.2f} | {first:.0f}, {later:.0f} "
            f"| {100 * first / waits:.0f} %, {100 * later / waits:.1f} % | {torchs} | {loads:.0f} |",
            flush=True,
        )
    print(
        "\nAlone are `dcp.save`, DeepSpeed's `save_checkpoint`, which flushes nothing to the disk, and Megatron's "
        "`dist_checkpointing.save`."
    )
    print(
        "The first save of an engine in the background has the machine hand out memory for the copies, which takes as long as "
        "the machine needs;\nlater ones copy into the same memory."
    )


if __name__ == "__main__":
    main()
