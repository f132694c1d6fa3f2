"""Time to cut Transformers classes into four stages, against torch's own ``pipeline()``.

Run ``python -m benchmarks.cutting``; it prints a section for ``benchmarks/README.md``. The classes are those that ``make test``
compares with the unmodified model: small, with random weights, in train mode. Both sides get the same cuts. Seconds are the
processor's; each side has cut one model before the first is timed. torch's side is its tracer and splitter alone: whether what
comes out also trains, or gives right gradients, is not asked.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

from torch import nn

from slapo_core import build_program, create_schedule
from tests.slapo_pipeline.families import CLASSES, FAST, class_name, places, small

STAGES = 4


def ours(model: nn.Module, batch: dict[str, Any], cuts: Sequence[str]) -> float:
    """Seconds."""
    start = time.process_time()
    schedule = create_schedule(model, example_inputs=batch)
    for path in cuts:
        schedule[path].cut_pipeline_stage()
    program = build_program(schedule)
    seconds = time.process_time() - start
    assert len(program.stages) == len(cuts) + 1
    return seconds


def torchs(model: nn.Module, batch: dict[str, Any], cuts: Sequence[str]) -> float | None:
    """Seconds; None where it raises."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    start = time.process_time()
    try:
        pipe = pipeline(model, (), batch, split_spec=dict.fromkeys(cuts, SplitPoint.END))
    except Exception:  # of any kind: what it cannot trace fails in many ways
        return None
    seconds = time.process_time() - start
    return seconds if pipe.num_stages == len(cuts) + 1 else None


def main(names: Sequence[str]) -> None:
    """Print the section."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    ratios: dict[str, float] = {}
    mine: list[float] = []
    for number, name in enumerate([names[0], *names]):
        model, batch = small(name)
        cuts = places(model, batch, STAGES)
        seconds, other = ours(copy.deepcopy(model), batch, cuts), torchs(copy.deepcopy(model), batch, cuts)
        if number == 0:
            continue
        mine.append(seconds)
        if other is not None:
            ratios[class_name(name)] = seconds / other
    print(f"\n## Cutting {len(names)} Transformers classes into {STAGES} stages, train mode\n")
    print("| | |")
    print("|---|---|")
    print(f"| cut by slapo | {len(mine)} of {len(names)} |")
    print(f"| by torch's pipeline() | {len(ratios)} of {len(names)} |")
    print(f"| slapo (s), median and largest | {median(mine):.2f}, {max(mine):.2f} |")
    low, middle, high = quantiles(ratios.values(), n=4)
    worst = max(ratios, key=ratios.__getitem__)
    print(f"| slapo / torch where both do, median (quartiles) | **{middle:.2f}** ({low:.2f} to {high:.2f}) |")
    print(f"| the largest | {ratios[worst]:.2f}, {worst} |")


if __name__ == "__main__":
    main(sys.argv[1:] or [name for name in FAST if name in CLASSES])
