"""On Megatron every layout trains as the unmodified model does in one process, with clipping, two micro-batches and ties.

Each with and without the distributed optimizer.
"""

from __future__ import annotations

import pytest

from slapo_core.testing import run_distributed

from .layouts import train_beside_reference

pytestmark = pytest.mark.multiproc

TWO = [({"dp": 2}, 1), ({"tp": 2}, 1), ({"pp": 2}, 1), ({"pp": 2}, 2)]
FOUR = [({"pp": 2, "tp": 2}, 2), ({"pp": 2, "tp": 2}, 1), ({"pp": 2, "dp": 2}, 1), ({"pp": 4}, 1), ({"dp": 2, "tp": 2}, 1)]
LONG = [("llama", 0), ("llama", 2), ("t5", 0), ("t5", 1), ("t5", 3)]


@pytest.mark.parametrize(
    ("name", "which"),
    [
        pytest.param(name, which, marks=[pytest.mark.slow] * ((name, which) in LONG))
        for name in ("gpt2", "llama", "t5")
        for which in range(len(TWO))
    ],
)
def test_two_ranks(name: str, which: int) -> None:
    layout, chunks = TWO[which]
    for worst in run_distributed(train_beside_reference, 2, name, layout, "fp32", chunks, timeout=100):
        del worst["scale"]
        assert {what.split()[0] for what in worst} == {"loss", "norm", "evaluation", "weight"}
        assert all(difference < 2e-5 for difference in worst.values()), worst


@pytest.mark.parametrize(
    ("name", "which"),
    [
        pytest.param(name, which, marks=[pytest.mark.slow] * ((name, which) != ("gpt2", 0)))
        for name in ("gpt2", "llama", "t5")
        for which in range(len(FOUR))
    ],
)
def test_four_ranks(name: str, which: int) -> None:
    layout, chunks = FOUR[which]
    for worst in run_distributed(train_beside_reference, 4, name, layout, "fp32", chunks, timeout=100):
        del worst["scale"]
        assert all(difference < 2e-5 for difference in worst.values()), worst


@pytest.mark.parametrize(
    ("name", "which"),
    [
        pytest.param(name, which, marks=[pytest.mark.slow] * ((name, which) not in (("gpt2", 0), ("llama", 3))))
        for name in ("gpt2", "llama", "t5")
        for which in range(len(TWO))
    ],
)
def test_bf16(name: str, which: int) -> None:
    """T5 computes its own loss in bf16, whose numbers are 0.03 apart there: of it the difference is a share of the loss."""
    layout, chunks = TWO[which]
    for worst in run_distributed(train_beside_reference, 2, name, layout, "bf16", chunks, timeout=100):
        scale = worst.pop("scale") if name == "t5" else 1.0
        found = {what: value / scale for what, value in worst.items() if what.startswith(("loss", "evaluation", "weight"))}
        assert all(difference < 2e-2 for difference in found.values()), worst
