"""Packages have rooms that a reader can see: few modules each, a paragraph that says what for, and imports one way."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict

import pytest

from .import_graph import TOP, Sources, cycles

SOURCES = Sources()
MOST = 15
DOCUMENTED_PATHS = {"slapo.autotune", "slapo.framework_dialect", "slapo.sharding"}
"""Rooms with one module, whose paths classic scripts import."""


def test_no_room_has_more_than_fifteen_modules_and_none_has_one() -> None:
    counts = Counter(SOURCES.room(name) for name in SOURCES.files if name not in SOURCES.packages)
    assert {room: count for room, count in counts.items() if count > MOST} == {}
    assert {room for room, count in counts.items() if count == 1 and "." in room} == DOCUMENTED_PATHS


def test_no_folder_of_tests_has_more_than_fifteen_files() -> None:
    counts = Counter(file.parent.relative_to(TOP) for file in (TOP / "tests").rglob("test_*.py"))
    assert {str(folder): count for folder, count in counts.items() if count > MOST} == {}


@pytest.mark.parametrize("room", sorted(SOURCES.packages))
def test_every_room_says_what_it_is_for(room: str) -> None:
    text = ast.get_docstring(SOURCES.trees[room]) or ""
    assert text.count("\n\n") or text.endswith("."), f"{room} has no sentence"
    depth = room.count(".")
    if depth and "plugins" not in room:
        assert len(text.split()) > 4, f"{room} does not say what it is for"


def test_rooms_import_one_way() -> None:
    arrows: dict[str, set[str]] = defaultdict(set)
    for each in SOURCES.imports:
        if each.for_types or each.source in SOURCES.packages:  # re-exports of a package are its own
            continue
        target = f"{each.module}.{each.name}" if f"{each.module}.{each.name}" in SOURCES.files else each.module
        rooms = SOURCES.room(each.source), SOURCES.room(target)
        if rooms[0] != rooms[1] and target.count("."):
            arrows[rooms[0]].add(rooms[1])
    assert cycles(arrows) == []


@pytest.mark.parametrize("for_types", [False, True])
def test_modules_import_one_way(for_types: bool) -> None:
    """Types may make a cycle in core alone: its interfaces name the schedule that they are called with."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for each in SOURCES.imports:
        target = f"{each.module}.{each.name}" if f"{each.module}.{each.name}" in SOURCES.files else each.module
        if (for_types or not each.for_types) and target not in SOURCES.packages and target != each.source:
            arrows[each.source].add(target)
    found = [group for group in cycles(arrows) if not (for_types and all(name.startswith("slapo_core.") for name in group))]
    assert found == []


def test_across_distributions_only_published_names_are_imported() -> None:
    wrong = [
        f"{each.source}:{each.line} imports {each.name} from {each.module}"
        for each in SOURCES.imports
        if each.source.partition(".")[0] != each.module.partition(".")[0]
        and not (
            each.name in SOURCES.published(each.module) and (each.module in SOURCES.packages or each.module.count(".") == 1)
        )
    ]
    assert wrong == []


def test_no_published_name_is_hidden_by_a_module_of_that_name() -> None:
    """Importing a module later would put it in the place of the function that its package exports."""
    hidden = [
        f"{package}.{name}"
        for package in SOURCES.packages
        for name in SOURCES.published(package)
        if f"{package}.{name}" in SOURCES.files
        and not any(
            each.source == package and (each.module == f"{package}.{name}" or (each.module == package and each.name == name))
            for each in SOURCES.imports
        )
    ]
    assert hidden == []
