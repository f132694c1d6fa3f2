"""The page of a run: what it says, that nothing in it can run, and, where there is a browser, that all of it can be read."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from slapo.report.page import page, write_report
from slapo.report.stylesheet import STYLE
from slapo.run_data.record import ModuleRecord, RankRecord, RunRecord, ScheduleStepRecord
from slapo.run_data.settings import Settings
from slapo.training import worker
from slapo.training.corpus import Corpus
from slapo_core import VerifyError

from ...browser import CHROMIUM, faults_of
from ...html_page import HOSTILE, Page


def make_record(**changes: object) -> RunRecord:
    record = RunRecord(
        settings=Settings(tp=2, pp=2, reference=True),
        modules=[ModuleRecord("", "Model", 100), ModuleRecord("h", "ModuleList", 80), ModuleRecord("h.0", "Block", 40)],
        steps=[ScheduleStepRecord("h.0", "shard", "sch['h.0'].shard('weight', axis=0)", "slapo-sharding 0.1.0")],
        stage_paths=[("h.0",), ("h.1",)],
        ranks=[RankRecord(rank, rank // 2, 0, rank % 2, (rank // 2,), 25) for rank in range(4)],
        source="a file",
        losses=[5.5, 5.0, 4.5],
        seconds=0.3,
        reference=[5.5, 5.0, 4.5 + 1e-6],
        timeline=[
            {"rank": rank, "stage": rank // 2, "kind": kind, "microbatch": 0, "start": 10.0 + start, "end": 10.001 + start}
            for rank in range(4)
            for kind, start in (("F", 0.0), ("B", 0.002))
        ],
        versions={"torch": "2.13.0"},
    )
    return replace(record, **changes)


def test_page_says_what_happened():
    text = Page(page(make_record())).text
    for word in (
        "gpt2: pp 2 x dp 1 x tp 2",
        "Same as the unmodified model",
        "sch['h.0'].shard('weight', axis=0)",
        "25.0%",
        "2.13.0",
        "ms per step: the mean over all steps of the scheduled run, 3,",
        "busy: the share of the time from the first forward to the last backward",
    ):
        assert word in text
    assert "a GPU's bars" not in text
    assert "a GPU's bars" in Page(page(make_record(settings=Settings(device="cuda", reference=True)))).text


def test_page_needs_nothing_but_itself():
    parsed = Page(page(make_record()))
    assert not [attrs for _, attrs in parsed.elements if {"src", "href", "action", "data", "srcset"} & set(attrs)]
    assert "url(" not in page(make_record())
    assert "@import" not in page(make_record())


def test_page_holds_the_run_as_json():
    parsed = Page(page(make_record(losses=[5.0, math.nan, math.inf])))
    run = json.loads(parsed.scripts[0])
    assert run["losses"] == [5.0, None, None]
    assert run["settings"]["tp"] == 2


def test_every_string_from_outside_is_escaped():
    record = make_record(
        settings=Settings(model=HOSTILE, data=(HOSTILE,), schedule=HOSTILE, report=HOSTILE, target=HOSTILE),
        modules=[ModuleRecord("", HOSTILE, 1), ModuleRecord(HOSTILE, HOSTILE, 1)],
        steps=[
            ScheduleStepRecord(HOSTILE, HOSTILE, HOSTILE, HOSTILE),
            ScheduleStepRecord("not in the model", HOSTILE, HOSTILE, HOSTILE, 1),
        ],
        stage_paths=[(HOSTILE,), (HOSTILE,)],
        source=HOSTILE,
        timeline=[{"rank": 0, "stage": HOSTILE, "kind": HOSTILE, "microbatch": HOSTILE, "start": 0.0, "end": 1.0}],
        versions={HOSTILE: HOSTILE},
    )
    parsed = Page(page(record))
    assert HOSTILE in parsed.text
    assert len(parsed.scripts) == 2
    assert json.loads(parsed.scripts[0])["source"] == HOSTILE
    assert not [tag for tag, attrs in parsed.elements if tag == "img" or any(name.startswith("on") for name in attrs)]


def test_losses_that_differ_are_told_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    record = make_record()
    monkeypatch.setattr(worker, "reference_losses", lambda settings, corpus: iter([5.5, 5.0, 4.6]))
    with pytest.raises(VerifyError, match="largest difference 1.0e-01, at step 3: NOT the same: above 1e-04"):
        worker.report_run(record, Corpus(torch.zeros(1), "a file"), Console())
    assert "NOT" not in capsys.readouterr().out


def test_losses_that_differ_are_called_so():
    text = Page(page(make_record(reference=[5.5, 5.0, 4.6]))).text
    assert "Not the same as the unmodified model" in text
    assert "1.0e-01 , at step 3 of 3" in text


def test_a_loss_that_is_no_number_never_agrees():
    assert not make_record(losses=[5.5, math.nan, 4.5]).is_within_tolerance


def test_empty_states():
    bare = make_record(reference=[], steps=[], timeline=[], stage_paths=[("",)])
    text = Page(page(bare)).text
    for word in ("Not compared", "No primitive was applied", "recorded no timeline"):
        assert word in text
    assert "No step was taken" in Page(page(make_record(losses=[], reference=[]))).text


def test_steps_on_modules_the_schedule_brought_in_are_shown():
    record = make_record(steps=[ScheduleStepRecord("h.0.new", "shard", "sch['h.0.new'].shard('weight')", "me 1")])
    assert "On modules that the schedule brought in sch['h.0.new'].shard('weight')" in Page(page(record)).text


def test_write_report_makes_the_folder(tmp_path: Path):
    path = write_report(make_record(), tmp_path / "deep" / "folder")
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def rules() -> dict[str, list[tuple[int, set[str]]]]:
    """For each selector of the style sheet outside of media queries: in which rules it stands, and what they set."""
    found: dict[str, list[tuple[int, set[str]]]] = defaultdict(list)
    plain = re.sub(r"/\*.*?\*/|@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", STYLE, flags=re.DOTALL)
    for index, (selectors, body) in enumerate(re.findall(r"([^{}]+)\{([^{}]*)\}", plain)):
        names = {declaration.partition(":")[0].strip() for declaration in body.split(";")} - {""}
        for selector in selectors.split(","):
            found[selector.strip()].append((index, names))
    return found


def test_no_class_of_the_style_sheet_is_defined_twice():
    """A class may share a rule with its neighbour and have one more beside it; anything else is two meanings of one name."""
    found = rules()
    assert len(found) > 60
    for selector, places in found.items():
        if not re.fullmatch(r"\.[\w-]+", selector):
            continue
        order = [index for index, _ in places]
        assert order[-1] - order[0] <= 2, selector
        properties = [name for _, names in places for name in names]
        assert len(properties) == len(set(properties)), selector


def test_only_what_the_pointer_shows_is_hidden():
    shown = {"details[open] > summary .inside"}  # sums up what the open module shows
    hidden = {selector for selector, places in rules().items() if any("display" in names for _, names in places)}
    text = {selector for selector in hidden if re.search(rf"{re.escape(selector)}[^{{}}]*\{{[^}}]*display: none", STYLE)}
    assert text == {".rule", ".readout"} | shown


def long_run(steps: int, microbatches: int) -> RunRecord:
    losses = [5.5 - 0.1 * step for step in range(steps)]
    timeline = [
        {"rank": rank, "tp": 0, "dp": 0, "stage": rank, "kind": kind, "microbatch": index, "start": start, "end": start + width}
        for rank in range(2)
        for index in range(microbatches)
        for kind, start, width in (("F", 0.004 * index, 0.0018), ("B", 0.06 + 0.004 * index, 0.0035))
    ]
    return make_record(losses=losses, reference=[loss + 1e-7 for loss in losses], timeline=timeline)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_all_text_can_be_read_in_a_browser(tmp_path: Path):
    for steps, microbatches in ((30, 12), (1, 1)):
        assert faults_of(page(long_run(steps, microbatches)), tmp_path) == []
    lost = page(long_run(3, 4)).replace("</style>", ".note { display: none; }</style>")
    assert any("hidden: Bubble" in fault for fault in faults_of(lost, tmp_path))
