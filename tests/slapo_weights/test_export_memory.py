"""``export_weights`` needs little memory: the first rank holds some of the tensors at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo
from slapo_testing import run_distributed
from slapo_weights import export_weights
from slapo_weights.export_plan import plan
from tests.slapo_torch.layouts import mesh_of

pytestmark = pytest.mark.multiproc
LAYERS, WIDTH = 20, 1024
SIZE = LAYERS * WIDTH * WIDTH * 4


def growth(rank: int, folder: str) -> int:
    """By how many bytes the process was larger at its largest while it exported 80 MiB."""
    sch = slapo.create_schedule(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))), mesh=mesh_of(tp=2)
    )
    for number in range(LAYERS):
        sch[str(number)].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    small = slapo.create_schedule(nn.Sequential(nn.Linear(WIDTH, WIDTH)), mesh=sch.mesh)
    export_weights(small, f"{folder}/small")  # whatever is imported and allocated once
    Path("/proc/self/clear_refs").write_text("5")  # the largest so far is the present one
    kept, before = plan._BUNDLE, _status("VmRSS")
    plan._BUNDLE = 1 << 22
    try:
        export_weights(sch, folder, max_shard_size="16MB")
    finally:
        plan._BUNDLE = kept
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_the_first_rank_holds_some_of_the_tensors_at_a_time(tmp_path: Path) -> None:
    first, second = run_distributed(growth, 2, str(tmp_path))
    assert first < SIZE / 3
    assert second < SIZE / 3
    assert len([*tmp_path.glob("model-*.safetensors")]) == 7


def test_a_bundle_holds_what_fits(tmp_path: Path) -> None:
    """The bound that is shrunk above is what cuts the bundles."""
    from slapo_weights.export_plan.tensor_origins import WholeTensor
    from slapo_weights.huggingface.unmodified_model import ConversionGroup

    half: Any = WholeTensor("", (plan._BUNDLE // 8,), torch.float32, ())
    groups = [ConversionGroup((name,), (), True) for name in "abcde"]
    made = plan.ExportPlan(dict.fromkeys("abcde", half), groups, [], None, None)
    assert [[group.sources[0] for group in bundle] for bundle in made.bundles()] == [["a", "b"], ["c", "d"], ["e"]]
