"""The warning about BatchNorm names what would still help."""

from __future__ import annotations

import pytest
from torch import nn

from slapo_training.first_step.diagnostics import Partition, rows_are_mixed


@pytest.mark.parametrize(
    ("norm", "microbatches", "replicas", "remedies"),
    [
        (nn.BatchNorm1d, 2, 2, ["sch.sync_batch_norm()", "over the replica"]),
        (nn.BatchNorm1d, 1, 2, ["sch.sync_batch_norm()"]),
        (nn.BatchNorm1d, 2, 1, ["over the whole batch"]),
        (nn.SyncBatchNorm, 2, 2, ["over the whole batch"]),
    ],
)
def test_remedies(norm: type[nn.Module], microbatches: int, replicas: int, remedies: list[str]) -> None:
    root = nn.Sequential(norm(4))
    said = rows_are_mixed(root, ["0"], None, Partition(microbatches, replicas), [*root])
    every = ["sch.sync_batch_norm()", "over the replica", "over the whole batch"]
    assert [each for each in every if each in said] == remedies
