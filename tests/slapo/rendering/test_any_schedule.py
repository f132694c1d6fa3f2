"""Any schedule of any model can be looked at, fast, and nothing changes by it."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import slapo.plugin
from slapo_core import Schedule, SlapoError, create_schedule
from slapo_testing.conformance.examples.model_snapshot import Snapshot
from tests.contracts.conftest import TOP
from tests.zoo.families import FAMILIES

STEPS: dict[str, Any] = {
    "annotate": lambda sch: sch.annotate("weight", "mark", 1),
    "checkpoint": lambda sch: sch.checkpoint(),
    "cut": lambda sch: sch.cut_pipeline_stage(),
    "cut before": lambda sch: sch.cut_pipeline_stage(where="before"),
    "decompose": lambda sch: sch.decompose(),
    "freeze": lambda sch: sch.freeze(),
    "replace": lambda sch: sch.replace(nn.Identity()),
    "replace all": lambda sch: sch.replace_all(nn.Dropout, lambda old: nn.Identity()),
    "shard rows": lambda sch: sch.shard("weight", axis=0),
    "shard columns": lambda sch: sch.shard("weight", axis=1),
    "sync": lambda sch: sch.sync("fwd_post", "all_reduce"),
    "undo": lambda sch: sch.undo(),
}


@pytest.fixture(scope="module", autouse=True)
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def state_of(sch: Schedule) -> tuple[str, bytes, random.Random]:
    return str(sch.journal), bytes(torch.get_rng_state().tolist()), random.getstate()  # type: ignore[return-value]


def check_shown(sch: Schedule) -> None:
    before, state = Snapshot(sch), state_of(sch)
    text, html = str(sch), sch._repr_html_()
    assert before.differences(Snapshot(sch)) == []
    assert state == state_of(sch)
    assert (text, html) == (str(sch), sch._repr_html_())
    assert max(map(len, text.splitlines())) <= 100
    assert html is not None
    assert len(re.findall("<details", html)) == html.count("</details>")


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(FAMILIES)),
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.floats(0, 1, exclude_max=True)), max_size=8),
    shown=st.floats(0, 1, exclude_max=True),
)
def test_looking_at_a_schedule_changes_nothing(name: str, steps: list[tuple[str, float]], shown: float) -> None:
    sch = create_schedule(FAMILIES[name].model())
    handles = [handle for _, handle in sch.named_schedules()]
    for step, place in steps:
        try:
            STEPS[step](handles[int(place * len(handles))])
        except SlapoError:  # refused, or the module is gone
            continue
    check_shown(sch)
    str(handles[int(shown * len(handles))])


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])
def test_a_tensor_parallel_family_is_folded(name: str) -> None:
    family = FAMILIES[name]
    sch = create_schedule(family.model(), example_inputs=family.batch())
    sch.tensor_parallel()
    check_shown(sch)
    assert "tp 2" in str(sch)
    assert len(str(sch).splitlines()) < 140


def test_ten_thousand_modules_take_less_than_half_a_second_of_a_quiet_machine() -> None:
    with torch.device("meta"):
        blocks = [
            nn.Sequential(nn.Linear(4, 4 + index % 7), nn.Sequential(nn.GELU(), nn.Linear(4, 4), nn.ReLU()), nn.Dropout())
            for index in range(1450)
        ]
    sch = create_schedule(nn.Sequential(*blocks))
    for index in range(0, 1450, 3):
        sch[f"{index}.0"].checkpoint()
    str(sch[""])
    start = time.process_time()
    text = str(sch)
    assert time.process_time() - start < 2  # a machine that runs other tests is not quiet
    assert len(text.splitlines()) < 220


def test_the_distribution_registers_the_plugin() -> None:
    assert '[project.entry-points.slapo]\nslapo = "slapo.plugin"\n' in (TOP / "pyproject.toml").read_text()
    assert Path(slapo.plugin.__file__).is_relative_to(TOP / "slapo/src")
