"""The pages of plans and tunings: what they say, what they leave out, and that nothing in them can run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slapo_report import CHART_STYLE, STYLE, plan_page, tune_page
from slapo_torch.timeline import COMPUTES

from ..browser import CHROMIUM, faults_of
from ..html_page import HOSTILE, Page
from .examples import GIB, one_forward_one_backward, plan, tuning

PAGES: dict[str, tuple[Callable[[Mapping[str, Any]], str], dict[str, Any]]] = {
    "plan": (plan_page, plan()),
    "tune": (tune_page, tuning()),
}


@pytest.mark.parametrize(
    "words",
    [
        "Fits : ranks 0-127 need the most memory, 55.9 GiB of the 80 GiB (69.9%) of h100-80g (peak: backward of",
        "step 8.41 s MFU 41.3% bubble 30.4% peak memory 55.9 GiB ranks 1,024 FLOPs of a step 3.52 EFLOP",
        "h100-80g: 80 GiB",
        "compute 4.72 s communication 1.13 s bubble 2.56 s",
        "rank 7 stage 7",
        "forward backward optimizer step idle",
        "reduce-scatter dp between nodes 10 1.60 GiB 16 GiB",
        "2.10 GiB 310 GiB, log scale",
        "sequence parallel yes",
    ],
)
def test_a_plan_says(words: str) -> None:
    assert words in Page(plan_page(plan())).text


@pytest.mark.parametrize(
    "words",
    [
        "Trial 13 is the best , 358.25 samples/s: tp 4, microbatches 4, checkpointed 30. It is verified.",
        "trials 40 measured 34 stopped or refused 3 failed 3",
        "speed-up over trial 0 1.57 x step 22.3 ms",
        "measured best stopped or refused failed best so far",
        "checkpointed 61.0%",
        "out of memory: 19 checkpointed layers are too few",
        "spent 6.87 min",
        "microbatches 1, 2, 4, 8",
        "13 measured, best 358.25 347.5 to 369 22.3 ms 23.5 ms yes 4 4 30",
    ],
)
def test_a_tuning_says(words: str) -> None:
    assert words in Page(tune_page(tuning())).text


@pytest.mark.parametrize("name", PAGES)
def test_every_key_may_be_missing(name: str) -> None:
    page, data = PAGES[name]
    assert "nan" not in Page(page({})).text.lower()
    for key in data:
        Page(page({other: value for other, value in data.items() if other != key}))
        Page(page({key: data[key]}))
        Page(page({**data, key: None}))


@pytest.mark.parametrize(("page", "title"), [(plan_page, "Plan"), (tune_page, "Tuning")])
def test_nothing_gives_a_page_without_sections(page: Callable[[Mapping[str, Any]], str], title: str) -> None:
    parsed = Page(page({}))
    assert f"{title} - slapo" in parsed.text
    assert "section" not in [tag for tag, _ in parsed.elements]


def hostile(data: Any) -> Any:
    """Return the data with every string replaced; keys that the pages know stay."""
    if isinstance(data, dict):
        return {key: hostile(value) for key, value in data.items()}
    if isinstance(data, list):
        return [hostile(value) for value in data]
    return HOSTILE if isinstance(data, str) else data


@pytest.mark.parametrize("name", PAGES)
def test_every_string_from_outside_is_escaped(name: str) -> None:
    page, data = PAGES[name]
    named = {
        "layout": {HOSTILE: 2},
        "settings": {HOSTILE: 1},
        "seconds": {HOSTILE: 1.0},
        "space": {HOSTILE: [HOSTILE, {HOSTILE: HOSTILE}]},
        "importances": {HOSTILE: 1.0},
        "budget": {HOSTILE: 1},
        "problems": [HOSTILE],
        "ranks": [{"ranks": [0, 1], "stages": [HOSTILE], "memory": {HOSTILE: 10}, "when": HOSTILE}],
        "traffic": {"labels": [HOSTILE], "bytes": [[10]]},
    }
    if name == "tune":
        named["trials"] = [{"number": 0, "values": {HOSTILE: HOSTILE}, "state": HOSTILE, "message": HOSTILE}]
    parsed = Page(page(hostile(data) | named))
    assert HOSTILE in parsed.text
    assert len(parsed.scripts) == 1
    assert not [tag for tag, attrs in parsed.elements if tag == "img" or any(key.startswith("on") for key in attrs)]


@pytest.mark.parametrize("name", PAGES)
def test_pages_load_nothing(name: str) -> None:
    page, data = PAGES[name]
    text = page(data)
    assert not [attrs for _, attrs in Page(text).elements if {"src", "href", "action", "data", "srcset"} & set(attrs)]
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


@pytest.mark.parametrize("name", PAGES)
def test_charts_have_a_name_one_stop_for_the_tab_key_and_a_table(name: str) -> None:
    page, data = PAGES[name]
    elements = Page(page(data)).elements
    charts = [attrs for _, attrs in elements if "data-marks" in attrs]
    assert charts
    assert all(attrs["tabindex"] == "0" and attrs["role"] == "group" and attrs["aria-label"] for attrs in charts)
    assert [tag for tag, attrs in elements if attrs.get("class") == "sortable"]
    assert all(attrs.get("scope") == "col" for tag, attrs in elements if tag == "th")


def test_ranks_that_are_equal_share_a_row() -> None:
    alone = [
        {"ranks": [rank, rank], "memory": {"parameters": GIB * (1 + rank // 128)}, "stages": [rank // 128]}
        for rank in range(512)
    ]
    text = Page(plan_page({"ranks": alone})).text
    for name in ("ranks 0-127", "ranks 128-255", "ranks 256-383", "ranks 384-511"):
        assert name in text
    assert "rank 1 " not in text
    assert "ranks 512 " in text


def test_of_many_rows_the_fullest_are_drawn_and_all_are_in_the_table() -> None:
    ranks = [{"ranks": [rank, rank], "memory": {"activations": GIB + rank}} for rank in range(100)]
    parsed = Page(plan_page({"ranks": ranks}))
    assert "the fullest 48 of 100 rows" in parsed.text
    assert sum(attrs.get("class") == "row" for _, attrs in parsed.elements) == 48
    assert sum(tag == "tr" for tag, _ in parsed.elements) == 101


def test_ranks_along_pp_and_their_collectives() -> None:
    ranks = [{"rank": rank, "count": 8, "stages": [rank], "memory": {"parameters": GIB}} for rank in range(2)]
    collectives = [{"kind": "all_reduce", "axis": "tp", "nbytes": 2**20, "count": 3, "rank": 1}]
    text = Page(plan_page({"ranks": ranks, "collectives": collectives, "notes": ["buffers are left out"]})).text
    for words in (
        "pp rank 1 stage 1",
        "ranks 16 ",
        "kind pp rank axis number bytes of one bytes all-reduce 1 tp 3 1 MiB 3 MiB",
    ):
        assert words in text
    assert "Notes buffers are left out" in text


def test_some_of_the_ranks_between_two() -> None:
    text = Page(plan_page({"ranks": [{"ranks": [0, 7], "count": 4, "memory": {"activations": 10}}]})).text
    assert "4 of ranks 0-7" in text


def test_a_plan_that_does_not_fit() -> None:
    parsed = Page(plan_page(plan(memory=40 * GIB)))
    assert "Does not fit : ranks 0-127 need the most memory, 55.9 GiB of the 40 GiB (140%) of h100-80g" in parsed.text
    assert sum(attrs.get("class") == "busy over" for _, attrs in parsed.elements) == 6


def test_problems_are_listed_whether_it_fits_or_not() -> None:
    problem = "tp=16: 8 key heads are not divisible by 16 ranks; the largest is 8"
    for data, lead in (
        ({"problems": [problem]}, "This plan has 1 problem"),
        ({**plan(), "problems": [problem]}, "The memory fits, but this plan does not work"),
        ({**plan(memory=GIB), "problems": [problem]}, "Does not fit"),
    ):
        text = Page(plan_page(data)).text
        assert lead in text
        assert problem in text


def test_what_the_kinds_leave_of_the_peak_is_shown() -> None:
    text = Page(plan_page({"ranks": [{"ranks": [0, 0], "memory": {"parameters": GIB}, "peak_bytes": 3 * GIB}]})).text
    assert "other 2 GiB" in text


def test_steps_of_many_thousand_actions_are_drawn_as_one_picture_a_rank() -> None:
    page = plan_page({"timeline": one_forward_one_backward(16, 512)})
    parsed = Page(page)
    assert sum(attrs.get("class") == "dense" for _, attrs in parsed.elements) == 16
    assert len(page) < 1_000_000
    assert "rank 15 stage 15" in parsed.text


def test_messages_are_not_drawn() -> None:
    message = {"rank": 0, "stage": 0, "microbatch": 0, "start": 0.0, "end": 0.0}
    kinds = ("SEND_F", "SEND_B", "RECV_F", "RECV_B")
    assert "Simulated" not in plan_page({"timeline": [{**message, "kind": kind} for kind in kinds]})


def test_kinds_of_actions_are_named_as_in_recorded_timelines() -> None:
    from slapo_report import ACTIONS

    assert ACTIONS == COMPUTES


def test_traffic_without_a_column_for_each_label_is_refused() -> None:
    with pytest.raises(ValueError, match="2 labels for 2 rows of .* values; give each label a row and a column"):
        plan_page({"traffic": {"labels": ["a", "b"], "bytes": [[1, 2], [3]]}})


def test_traffic_of_many_groups_is_summed_over_neighbours() -> None:
    labels = [f"ranks {8 * index}-{8 * index + 7}" for index in range(64)]
    parsed = Page(plan_page({"traffic": {"labels": labels, "bytes": [[GIB] * 64] * 64}}))
    cells = [attrs["title"] for _, attrs in parsed.elements if attrs.get("class") == "cell"]
    assert len(cells) == 32 * 32
    assert cells[1] == "from ranks 0-15 to ranks 16-31: 4 GiB"


@pytest.mark.parametrize(
    ("interval", "words"),
    [([9.0, 11.5], "10 samples/s (9 to 11.5)"), (0.5, "10 samples/s (9.5 to 10.5)"), (None, "10 samples/s")],
)
def test_the_interval_is_two_throughputs_or_half_of_their_distance(interval: object, words: str) -> None:
    trial = {"number": 3, "state": "measured", "throughput": 10.0, "interval": interval, "values": {"tp": 2}}
    page = tune_page({"trials": [trial], "best": 3})
    assert f'title="trial 3, measured, {words}, tp 2"' in page


def test_a_trial_that_is_refuted_is_a_failure() -> None:
    trials = [{"number": 0, "state": "measured", "throughput": 9.0, "verified": False, "message": "gradients differ"}]
    parsed = Page(tune_page({"trials": trials, "best": None}))
    assert [attrs["class"] for _, attrs in parsed.elements if str(attrs.get("class")).startswith("point")] == ["point failed"]
    assert "measured 0" in parsed.text


def test_a_tuning_without_a_result() -> None:
    text = Page(
        tune_page({"trials": [{"number": 0, "state": "failed", "message": "out of memory"}], "failures": ["a", "a"]})
    ).text
    assert "No trial gave a throughput , of 1." in text
    assert "a (2 times)" in text


def test_no_selector_of_the_charts_has_a_rule_twice() -> None:
    plain = re.sub(r"/\*.*?\*/|@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", STYLE + CHART_STYLE, flags=re.DOTALL)
    selectors = [selector.strip() for selector in re.findall(r"([^{}]+)\{[^{}]*\}", plain)]
    assert len(selectors) > 100
    assert {selector for selector in selectors if selectors.count(selector) > 1} <= {":root"}


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_all_text_can_be_read_in_a_browser_and_keys_and_buttons_work(tmp_path: Path) -> None:
    pages = [plan_page(plan()), plan_page(plan(stages=2, microbatches=2, memory=20 * GIB)), tune_page(tuning())]
    assert [faults_of(page, tmp_path) for page in pages] == [[], [], []]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.slow
def test_pages_with_one_of_each_or_very_many_can_be_read(tmp_path: Path) -> None:
    one = plan_page({"ranks": [{"ranks": [0, 0], "memory": {"parameters": 10}}], "traffic": {"labels": ["0"], "bytes": [[0]]}})
    trial = tune_page({"trials": [{"number": 0, "state": "measured", "throughput": 3.0}], "best": 0, "best_so_far": [3.0]})
    pages = [one, trial, plan_page(plan(stages=16, microbatches=512)), tune_page(tuning(300))]
    long = "a name that is longer than the people who made the page for it had thought that a name could be"
    entry = {"ranks": [0, 16383], "count": 77, "stages": list(range(12)), "memory": {long: GIB, "other": GIB}, "when": long}
    pages.append(plan_page({"hardware": {"name": long, "memory_bytes": GIB / 9}, "ranks": [entry, {**entry, "count": 78}]}))
    assert [faults_of(page, tmp_path) for page in pages] == [[]] * 5
