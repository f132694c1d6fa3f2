"""Every name of the reference's page ``slapo.schedule``."""

from __future__ import annotations

import copy

from torch.nn import functional as F

import slapo
from tests.slapo.reference.test_slapo_names import SLAPO
from tests.slapo.reference_pages import MLP, Page, Stack, each_name, same, scheduled

SCHEDULE = Page(slapo.schedule)

for again in ("ScheduleMetadata", "list_primitives", "create_schedule"):
    SCHEDULE.row(again, SLAPO.arguments[again])(SLAPO.calls[again])


@SCHEDULE.row("Schedule", "mod, name='', path='', parent=None, group=None")
def _() -> None:
    model = MLP()
    sch = slapo.schedule.Schedule(model, "top", group=None)
    assert (sch.mod, sch.name, sch.path, sch["fc1"].parent) == (model, "top", "", sch)
    assert sch["fc1"].parent is sch
    assert sch["fc1"] is sch.child["fc1"]


@SCHEDULE.row("Schedule.named_schedules", "self, prefix=''")
def _() -> None:
    sch = scheduled(MLP())
    found = dict(sch.named_schedules("model"))
    assert {"model.fc1", "model.act", "model.fc2"} <= found.keys()
    assert found["model.fc1"] == sch["fc1"]


@SCHEDULE.row("Schedule.find_node", "self, regex_or_pattern_fn")
def _() -> None:
    sch = scheduled()
    sch["layers.0"].trace()
    found = sch.find_node("fc[12]")
    assert [(parent, node.target) for parent, node in found] == [("layers.0", "fc1"), ("layers.0", "fc2")]
    assert [node.target for _, node in sch.find_node(lambda node: node.op == "call_function")][-1] is F.gelu


@SCHEDULE.row("Schedule.find_subgraph", "self, pattern_fn")
def _() -> None:
    sch = scheduled()
    sch.trace()
    found = sch.find_subgraph(lambda x: F.gelu(x + 1))
    assert [[parent for parent, _ in match] for match in found] == [["layers.0"] * 2, ["layers.1"] * 2]


@SCHEDULE.row("Schedule.find", "self, regex_or_pattern_fn")
def _() -> None:
    sch = scheduled()
    sch.trace()
    assert sch.find("fc1") == sch.find_node("fc1")
    pattern = lambda x: slapo.call_module("act", slapo.call_module("fc1", x))  # noqa: E731
    assert sch.find(pattern) == sch.find_subgraph(pattern)
    assert len(sch.find(pattern)) == 2


@SCHEDULE.row("Schedule.trace_until", "self, paths, **kwargs")
def _() -> None:
    model = Stack()
    reference = copy.deepcopy(model)
    sch = scheduled(model)
    sch.trace_until(["layers.0", "layers.1"])
    assert [node.target for node in sch.mod.graph.find_nodes(op="call_module")] == ["layers.0", "layers.1"]
    same(reference, sch.mod)
    sch.undo()
    sch.trace_until("layers.1.fc1", tracer="value")
    assert sch.find_node("layers.1.fc1")
    same(reference, sch.mod)


METHODS = ["named_schedules", "find_node", "find_subgraph", "find", "trace_until"]


def test_no_name_of_the_page_is_waived() -> None:
    functions = {"ScheduleMetadata", "list_primitives", "create_schedule", "Schedule"}
    assert SCHEDULE.calls.keys() == functions | {f"Schedule.{name}" for name in METHODS}


@each_name(SCHEDULE)
def test_the_documented_arguments_are_taken(name: str) -> None:
    SCHEDULE.check_arguments(name)


@each_name(SCHEDULE)
def test_what_the_page_says_is_so(name: str) -> None:
    SCHEDULE.show(name)
