"""Predicted seconds of training steps against measured ones, for every configuration of the space of ``benchmarks.tuning``.

Run ``python -m benchmarks.step_time``; it prints a section for ``benchmarks/README.md``. The measured seconds are those that
``python -m benchmarks.tuning measure`` stored, with a calibration of the same machine without other work. The
predictions come from ``slapo.estimate`` on fake ranks, with weights on meta.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.tuning import MACHINE, configurations, predicted_seconds, rank_correlation, stored_seconds
from slapo_plan import Hardware
from slapo_tune.schedule_space.schedule_space import configuration_key


def kind_of(values: Mapping[str, Any]) -> str:
    """Return the words for a configuration without its numbers."""
    if values["kind"] == "tensor":
        return "tensor parallel" + ", along the sequence" * values["sequence_parallel"]
    return str(values.get("data_parallel") or f"pipeline, {values['pipeline_schedule']}")


def main() -> None:
    """Print the section."""
    hardware, measured = Hardware.load(MACHINE), stored_seconds()
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for values in configurations():
        found, predicted = measured[configuration_key(values)], predicted_seconds(values, hardware)
        if found is not None and predicted is not None:
            pairs[kind_of(values)].append((predicted, found))
    print("## Predicted and measured step time on this machine\n")
    print("| layouts of a GPT-2 on 2 gloo ranks | configurations | predicted / measured, median | 5 % and 95 % | correlation |")
    print("|---|---|---|---|---|")
    every = [pair for found in pairs.values() for pair in found]
    for name, found in (*pairs.items(), ("**all**", every)):
        ratios = sorted(predicted / real for predicted, real in found)
        ends = f"{ratios[len(ratios) // 20]:.2f}, {ratios[-1 - len(ratios) // 20]:.2f}"
        print(f"| {name} | {len(found)} | {median(ratios):.2f} | {ends} | {rank_correlation(*zip(*found, strict=True)):.2f} |")
    fastest = min(real for _, real in every)
    chosen = min(every)[1]
    print(
        f"\nThe configuration that is predicted to be the fastest takes {chosen / fastest - 1:.1%} longer than the fastest. "
        "Correlation is\nSpearman's. Each measured time is the fastest of six steps."
    )


if __name__ == "__main__":
    main()
