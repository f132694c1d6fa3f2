"""Predicted against measured seconds of training steps on this machine, with target ``torch``.

Run ``python -m benchmarks.step_time``; it prints a section for ``benchmarks/README.md``. The machine is calibrated first. Each
layout then runs on one or two gloo processes: one step under the recorder, whose operators are priced, then steps that are
measured. Other programs disturb both: the fastest step counts. The time of the processor, which they disturb less, stands
beside the mean over ranks of what they compute, without waiting and bubbles.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from slapo_plan.hardware import Hardware, calibrate, collective_seconds, work_seconds
from slapo_plan.recording import OperatorRecorder
from slapo_plan.records import CollectiveRecord
from slapo_plan.simulation import StepCosts, simulate_step
from slapo_testing import run_distributed

SECONDS = 5.0
"""Time for the steps of a layout; there are ten at least."""


class Layout(NamedTuple):
    """One run."""

    width: int
    layers: int
    rows: int
    length: int
    axes: tuple[tuple[str, int], ...] = ()
    microbatches: int = 1
    schedule: str = "1f1b"

    def __str__(self) -> str:
        axes = " ".join(f"{axis}{size}" for axis, size in self.axes) or "one rank"
        schedule = f" {self.schedule}" if dict(self.axes).get("pp") else ""
        sizes = f"width {self.width}, {self.layers} layers, {self.rows} x {self.length}"
        return f"{axes}{schedule}, {self.microbatches} micro-batches, {sizes}"


TP, PP, DP = (("tp", 2),), (("pp", 2),), (("dp", 2),)
TINY, SMALL, MEDIUM = (256, 2, 8, 32), (256, 4, 8, 128), (512, 6, 8, 128)
LAYOUTS = [
    Layout(*TINY),
    Layout(*TINY, TP),
    Layout(*TINY, PP, 2),
    Layout(*TINY, PP, 4),
    Layout(*TINY, DP, 1),
    Layout(*SMALL),
    Layout(*SMALL, (), 4),
    Layout(*MEDIUM),
    Layout(*MEDIUM, (), 4),
    Layout(*SMALL, TP),
    Layout(*SMALL, TP, 4),
    Layout(*MEDIUM, TP),
    Layout(*SMALL, PP, 4),
    Layout(*MEDIUM, PP, 4),
    Layout(*MEDIUM, PP, 8),
    Layout(*MEDIUM, PP, 4, "gpipe"),
    Layout(*SMALL, DP, 2),
    Layout(*MEDIUM, DP, 1),
    Layout(*MEDIUM, DP, 2),
]


class PhaseRecorder(OperatorRecorder):
    """Recorder that keeps forwards, backwards and the rest of a step apart."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, list[Any]] = defaultdict(list)
        self.phase = "rest"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.records)
        output = super().__torch_dispatch__(func, types, args, kwargs)
        backward = torch._C._current_graph_task_id() != -1
        self.phases["B" if backward else self.phase] += self.records[before:]
        return output


def run(rank: int, layout: Layout) -> dict[str, Any]:
    """Return what this rank recorded, and the seconds of its steps."""
    from transformers import GPT2Config, GPT2LMHeadModel

    import slapo
    from tests.slapo_torch.layouts import adamw, mesh_of

    torch.set_num_threads(1)
    sizes = {"n_embd": layout.width, "n_layer": layout.layers, "n_head": layout.width // 64, "vocab_size": 4096}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        **sizes,
        **rates,
        n_positions=layout.length,
        use_cache=False,
        loss_type="ForCausalLMLoss",
        bos_token_id=1,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model, axes = GPT2LMHeadModel(config), dict(layout.axes)
    rows = layout.rows // axes.get("dp", 1)
    ids = torch.randint(0, 4096, (rows, layout.length))
    batch = {"input_ids": ids, "labels": ids}
    mesh = mesh_of(**axes) if axes else None
    part = {key: value[: rows // layout.microbatches] for key, value in batch.items()}
    sch = slapo.create_schedule(model, mesh=mesh, example_inputs=part)
    if axes.get("tp"):
        sch.tensor_parallel()
    if axes.get("pp"):
        sch.pipeline(2)
    options = {"pipeline_schedule": layout.schedule} if axes.get("pp") else {}
    engine: Any = slapo.build(sch, "torch", optimizer=adamw, microbatches=layout.microbatches, record_timeline=True, **options)
    for _ in range(2):
        engine.train_batch(**batch)
    recorder = PhaseRecorder()
    hooks = [
        each.register_forward_pre_hook(lambda *_: setattr(recorder, "phase", "F"), prepend=True) for each in [engine.module]
    ]
    hooks += [engine.optimizer.register_step_pre_hook(lambda *_: setattr(recorder, "phase", "optimizer"))]
    with recorder:
        engine.train_batch(**batch)
    for hook in hooks:
        hook.remove()
    parameters = sum(each.numel() * 4 for group in engine.optimizer.param_groups for each in group["params"])
    start, seconds = time.perf_counter(), []
    engine.train_batch(**batch)
    steps = [max(10, int(SECONDS / (time.perf_counter() - start)))]
    dist.broadcast_object_list(steps)
    processor = []
    for _ in range(*steps):
        start, busy = time.perf_counter(), time.process_time()
        engine.train_batch(**batch)
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - busy)
    return {"phases": dict(recorder.phases), "seconds": seconds, "processor": processor, "parameters": parameters}


def predict(layout: Layout, found: list[dict[str, Any]], hardware: Hardware) -> Any:
    """Return the simulated step of a layout."""
    from slapo_torch.dialect import TorchDialect

    axes = dict(layout.axes)
    pp, dp, world = axes.get("pp", 1), axes.get("dp", 1), len(found)
    here = hardware.with_busy(world)
    model: Any = TorchDialect.classes["step_model"]
    options = {"pipeline_schedule": layout.schedule}
    actions, optimizer, messages = {}, {}, {}
    for stage in range(pp):
        phases = found[stage]["phases"]
        for kind in "FB":
            work = [each for each in phases[kind] if not (isinstance(each, CollectiveRecord) and each.kind == "send")]
            seconds = work_seconds(work, here)
            actions[stage, kind] = (seconds.compute + seconds.communication) / layout.microbatches
        seconds = work_seconds(phases.get("optimizer", ()), here)
        optimizer[stage] = seconds.compute + seconds.communication
    if pp > 1:
        nbytes = layout.rows // layout.microbatches * layout.length * layout.width * 4
        lasts = collective_seconds(CollectiveRecord("send", nbytes, (0, 1)), here)
        messages = {(0, 1): lasts, (1, 0): lasts}
    reductions = {}
    if dp > 1:
        reductions = {0: collective_seconds(CollectiveRecord("all_reduce", found[0]["parameters"], (0, 1)), here)}
    costs = StepCosts(
        actions,
        messages,
        model.message_mode(options, pp, pp, layout.microbatches),
        reductions,
        here.overlaps and model.overlaps_reduction(options, pp, pp),
        {0: max(1, found[0]["parameters"] // (25 * 2**20))},
        optimizer,
    )
    return simulate_step(model.action_order(options, pp, pp, layout.microbatches), costs)


def ranks_of(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(index) for index in range(len(values))]


def correlation(first: list[float], second: list[float]) -> float:
    """Spearman's rank correlation."""
    pairs, count = zip(ranks_of(first), ranks_of(second), strict=True), len(first)
    return 1 - 6 * sum((a - b) ** 2 for a, b in pairs) / (count * (count**2 - 1))


def main() -> None:
    """Print the section."""
    path = sys.argv[1] if len(sys.argv) > 1 else None
    hardware = Hardware.load(path) if path else calibrate((1, 2))
    print("## Predicted and measured step time on this machine\n")
    print("| layout | measured ms | predicted ms | ratio | processor ms of a rank | predicted ms | ratio |", flush=True)
    print("|---|---|---|---|---|---|---|", flush=True)
    measured, predicted = [], []
    for layout in LAYOUTS:
        world = 1
        for _, size in layout.axes:
            world *= size
        found = run_distributed(run, world, layout, timeout=300)
        step = predict(layout, found, hardware)
        measured.append(min(found[0]["seconds"]))
        predicted.append(step.seconds)
        busy = fmean(min(each["processor"]) for each in found)
        pairs = [(measured[-1], predicted[-1]), (busy, step.computing)]
        cells = [f"{real * 1e3:.0f} | {guess * 1e3:.0f} | {guess / real:.2f}" for real, guess in pairs]
        print(f"| {layout} | {' | '.join(cells)} |", flush=True)
    ratios = [guess / real for guess, real in zip(predicted, measured, strict=True)]
    print(f"\nRank correlation {correlation(measured, predicted):.2f}; median ratio {median(ratios):.2f}.")


if __name__ == "__main__":
    main()
