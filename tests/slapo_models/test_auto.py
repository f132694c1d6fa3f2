"""``apply_schedule(model)`` of every family: outputs, gradients and a step are those of the unmodified model."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from slapo_core import ScheduleError
from slapo_models import apply_schedule
from slapo_verify import Report, run_as_threads, verify
from tests.slapo_models.cases import CASES
from tests.slapo_models.family_models import NAMES, family_model
from tests.slapo_torch.layouts import mesh_of

LAYOUTS = {"1": {}, "tp": {"tp": 2}, "pp": {"pp": 2}, "tp-pp": {"tp": 2, "pp": 2}}
FAST = {("nanogpt", "tp-pp"), ("llama4_text", "tp"), ("deepseek_v3", "tp"), ("phi", "tp"), ("gemma2", "tp"), ("llama", "pp")}


def verified(name: str, layout: dict[str, int], **config: Any) -> Report:
    model, batch = family_model(name)
    reference = copy.deepcopy(model)
    sch = apply_schedule(model, mesh=mesh_of(**layout), example_inputs=batch, **config)
    return verify(reference, sch, level="step")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[pytest.mark.slow] * ((name, layout) not in FAST))
        for name in NAMES
        for layout in LAYOUTS
    ],
)
def test_every_family_in_every_layout(name: str, layout: str) -> None:
    sizes = LAYOUTS[layout]
    ranks = sizes.get("tp", 1) * sizes.get("pp", 1)
    for report in run_as_threads(lambda: verified(name, sizes, checkpoint=1.0), ranks):
        wrong = [each for each in report.differences if not (name == "phi" and "k_proj.bias" in each.what)]  # partly 0: noise
        assert report.ok or not wrong, report
        assert report.compared["gradients"]


CAUSAL = ("llama", "gpt2", "gemma2", "gpt_neox", "gpt_oss", "mixtral", "phi3", "qwen3", "qwen3_moe")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "llama")) for name in CAUSAL])
def test_kernels_and_a_loss_of_sharded_logits(name: str) -> None:
    for report in run_as_threads(lambda: verified(name, {"tp": 2}, kernels=True, parallel_loss=True), 2):
        missing = "output: the structure differs; missing [\"['logits']\"], not expected []"  # no rank has whole logits
        assert [each.message for each in report.differences] == [missing], report
        assert report.compared["gradients"]


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        (["layer_nrom"], r"use_kernels\(''\): no kernel 'layer_nrom'; did you mean 'layer_norm'"),
        ("swiglu", r"use_kernels\(''\): nothing from here down computes 'swiglu'"),
    ],
)
def test_kernels_that_are_named_are_found_or_refused(kernels: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        apply_schedule(CASES["gpt2"].model(), kernels=kernels)
    sch = apply_schedule(CASES["gpt2"].model(), kernels="bias_act", disable_fuse_bias_gelu=False)
    assert [step.partition("(")[0] for step in map(str, sch.journal)] == ["sch.use_kernels"]
