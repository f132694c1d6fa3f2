"""Each family by its ready schedule computes and trains what the unmodified model does, on every engine."""

from __future__ import annotations

import pytest

from slapo_testing import run_distributed
from tests.slapo_models.cases import CASES, of_engine, of_model

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor"
    ),  # torch's compiler asks, of inputs that are not leaves
]

ONE, TP, PP = {"pp": 1}, {"tp": 2}, {"pp": 2}
BOTH = {"pp": 2, "tp": 2}
LAYOUTS = (ONE, TP, PP, BOTH)
FAST = (("gpt2", "torch", TP), ("gpt2", "deepspeed", PP), ("gpt2", "megatron", PP))
SHORT = [(key, TP) for key in ("albert", "gpt2", "t5", "wideresnet")]
ENGINES = [(key, target, layout) for key in CASES for target in ("torch", "deepspeed", "megatron") for layout in LAYOUTS]


def ranks(layout: dict[str, int]) -> int:
    return layout.get("pp", 1) * layout.get("tp", 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("key", "layout"),
    [
        pytest.param(key, layout, marks=[pytest.mark.slow] * ((key, layout) not in SHORT), id=f"{key}-{layout}")
        for key in CASES
        for layout in LAYOUTS
    ],
)
def test_outputs_gradients_and_a_step(key: str, layout: dict[str, int]) -> None:
    for report in run_distributed(of_model, ranks(layout), key, layout, CASES[key].everything, timeout=100):
        assert report.ok, report
        assert report.compared["gradients"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("key", "target", "layout"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] * (each not in FAST), id=f"{each[0]}-{each[1]}-{each[2]}")
        for each in ENGINES
    ],
)
def test_a_step_of_an_engine(key: str, target: str, layout: dict[str, int]) -> None:
    for report in run_distributed(of_engine, ranks(layout), key, layout, CASES[key].everything, target, timeout=100):
        assert report.ok, report


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=[pytest.mark.slow] * (key != "gpt2")) for key in CASES if key != "wideresnet"]
)
def test_a_sequence_in_parts(key: str) -> None:
    for report in run_distributed(of_model, 2, key, TP, {"sequence_parallel": True, "ckpt_ratio": 1.0}, timeout=100):
        assert report.ok, report
