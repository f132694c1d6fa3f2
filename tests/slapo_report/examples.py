"""Plans and tunings as the planner and the tuner describe them."""

from __future__ import annotations

import random
from typing import Any

GIB = 2**30
KINDS = {
    "parameters": 8.7,
    "gradients": 8.7,
    "optimizer state": 9.1,
    "main copies": 4.4,
    "activations": 21.5,
    "recomputation": 2.3,
    "logits and loss": 0.0,
    "buffers": 1.2,
}


def one_forward_one_backward(ranks: int, microbatches: int, seconds: float = 0.02) -> list[dict[str, Any]]:
    """Return the actions of a 1F1B step, one stage a rank, and an optimizer step."""
    done: dict[tuple[str, int, int], float] = {}
    orders = []
    for rank in range(ranks):
        warm = min(ranks - rank, microbatches)
        order = [("F", index) for index in range(warm)]
        for index in range(microbatches):
            order.append(("B", index))
            if warm + index < microbatches:
                order.append(("F", warm + index))
        orders.append(order)
    free, events, at = [0.0] * ranks, [], [0] * ranks
    while any(position < len(order) for position, order in zip(at, orders, strict=True)):
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                kind, index = order[at[rank]]
                before = rank - 1 if kind == "F" else rank + 1
                needed = (kind, before, index) if 0 <= before < ranks else None
                if needed and needed not in done:
                    break
                start = max(free[rank], done[needed] if needed else 0.0)
                free[rank] = done[kind, rank, index] = start + seconds * (1 if kind == "F" else 2)
                place = {"rank": rank, "stage": rank, "microbatch": index}
                events.append({**place, "kind": kind, "start": start, "end": free[rank]})
                at[rank] += 1
    end = max(free)
    whole = {"microbatch": None, "kind": "optimizer step", "start": end, "end": end + seconds}
    return events + [{"rank": rank, "stage": rank, **whole} for rank in range(ranks)]


def plan(stages: int = 8, microbatches: int = 16, memory: float = 80 * GIB) -> dict[str, Any]:
    """Return a plan of tp 8 x pp ``stages`` x dp 16."""
    per_stage = 128
    ranks = []
    for stage in range(stages):
        held = {kind: GIB * value * (0.55 + 0.45 * (stages - stage) / stages) for kind, value in KINDS.items()}
        held["logits and loss"] = 6.1 * GIB if stage == stages - 1 else 0
        peak = int(sum(held.values()))
        place = {"ranks": [stage * per_stage, (stage + 1) * per_stage - 1], "count": per_stage, "stages": [stage]}
        ranks.append({**place, "memory": held, "peak_bytes": peak, "when": f"backward of micro-batch {stages - stage}"})
    labels = [f"ranks {stage * per_stage}-{(stage + 1) * per_stage - 1}" for stage in range(stages)]
    sent = [[310 * GIB if a == b else 2.1 * GIB if abs(a - b) == 1 else 0 for b in range(stages)] for a in range(stages)]
    return {
        "title": f"llama-70b: tp 8 x pp {stages} x dp 16 on h100",
        "model": "llama-70b",
        "layout": {"tp": 8, "pp": stages, "dp": 16},
        "target": "torch",
        "hardware": {"name": "h100-80g", "memory_bytes": memory},
        "settings": {
            "pipeline_schedule": "1f1b",
            "microbatches": microbatches,
            "sequence_parallel": True,
            "optimizer": "AdamW",
        },
        "ranks": ranks,
        "collectives": [
            {"kind": "all_reduce", "axis": "tp", "count": 2560, "nbytes": GIB // 4, "link": "within a node"},
            {"kind": "reduce_scatter", "axis": "dp", "count": 10, "nbytes": 1.6 * GIB, "link": "between nodes"},
            {"kind": "all_gather", "axis": "dp", "count": 10, "nbytes": 0.8 * GIB, "link": "between nodes"},
            {"kind": "send", "axis": "pp", "count": 2 * microbatches, "nbytes": 4.2 * GIB / 32, "link": "between nodes"},
        ],
        "traffic": {"labels": labels, "bytes": sent},
        "flops": {"model": 3.52e18, "hardware": 4.4e18},
        "bubble": 0.304,
        "step_seconds": 8.41,
        "mfu": 0.413,
        "seconds": {"compute": 4.72, "communication": 1.13, "bubble": 2.56},
        "timeline": one_forward_one_backward(stages, microbatches),
        "problems": [],
    }


def tuning(number: int = 40, seed: int = 0) -> dict[str, Any]:
    """Return a tuning with stopped and failed trials."""
    draw = random.Random(seed)
    trials, so_far, best = [], [], None
    for index in range(number):
        values = {
            "tp": draw.choice([1, 2, 4]),
            "microbatches": draw.choice([1, 2, 4, 8]),
            "checkpointed": draw.randrange(0, 33),
        }
        trial: dict[str, Any] = {"number": index, "values": values, "predicted": 0.02 + draw.random() * 0.05}
        kind = draw.random()
        if kind < 0.1:
            trial |= {"state": "failed", "message": f"out of memory: {values['checkpointed']} checkpointed layers are too few"}
        elif kind < 0.2:
            trial |= {"state": "refused", "message": "refused, because the planner needs 91.2 GiB of 80 GiB"}
        else:
            seconds = trial["predicted"] * draw.uniform(0.9, 1.3)
            speed = 8 / seconds
            trial |= {"state": "measured", "seconds": seconds, "throughput": speed, "interval": [0.97 * speed, 1.03 * speed]}
            best = trial if best is None or speed > best["throughput"] else best
        trials.append(trial)
        so_far.append(best["throughput"] if best else None)
    if best is not None:
        best["verified"] = True
    return {
        "title": "llama: 40 trials on 2 ranks",
        "space": {"tp": [1, 2, 4], "microbatches": [1, 2, 4, 8], "checkpointed": "0 to 32"},
        "trials": trials,
        "best": best["number"] if best else None,
        "best_so_far": so_far,
        "importances": {"checkpointed": 0.61, "tp": 0.3, "microbatches": 0.09},
        "failures": [trial["message"] for trial in trials if trial["state"] == "failed"],
        "budget": {"trials": number, "spent_seconds": 412.0, "timeout_seconds": 120},
    }
