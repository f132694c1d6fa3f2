"""The schedule as a cursor: moving around, facts, and what is known of a module."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

from slapo_core import (
    Schedule,
    ScheduleError,
    UnknownNameError,
    build,
    create_schedule,
    is_module_list,
    make,
    parameter_facts,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.attn(x))


class Tied(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.wte = nn.Embedding(8, 4)
        self.h = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


def test_a_module_has_one_schedule() -> None:
    sch = Schedule(Tied())
    assert sch["h.1.mlp"].parent is sch["h.1"]
    assert sch["h"].parent is sch.get_top_schedule() is sch["h.1.mlp"].get_top_schedule() is sch
    block = sch["h.1"]
    assert block is sch["h"]["1"] is sch["h"].child["1"] is dict(sch.named_schedules())["h.1"]
    copied = copy.deepcopy(block)
    assert copied.parent is not block.parent
    assert copied.mod is not block.mod


def test_a_path_leads_to_the_module_itself() -> None:
    model = Tied()
    sch = create_schedule(model, name="top")
    handle = sch["h.1.mlp"]
    assert handle.mod is model.h[1].mlp
    assert (handle.path, handle.name, handle.parent) == ("h.1.mlp", "mlp", sch["h.1"])
    assert handle["0"] == sch["h.1.mlp.0"]
    assert (sch.name, sch.parent, handle.get_top_schedule()) == ("top", None, sch)
    assert list(handle.child) == ["0", "1", "2"]
    assert "mlp.0" in sch["h.1"]
    assert "mlp.9" not in sch["h.1"]


def test_an_unknown_path_says_what_is_there() -> None:
    with pytest.raises(UnknownNameError, match=r"no module 'h.0.mpl'; did you mean 'h.0.mlp'\?; available: h.0.attn, h.0.mlp"):
        create_schedule(Tied())["h.0"]["mpl"]


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("h.*", ["h.0", "h.1", "h.2"]),
        ("h.[01].attn", ["h.0.attn", "h.1.attn"]),
        ("**.attn", ["h.0.attn", "h.1.attn", "h.2.attn"]),
        ("h.0.**.?", ["h.0.mlp.0", "h.0.mlp.1", "h.0.mlp.2"]),
        ("wte", ["wte"]),
    ],
)
def test_select_stays_within_one_name_unless_told(pattern: str, paths: list[str]) -> None:
    assert [handle.path for handle in create_schedule(Tied()).select(pattern)] == paths


def test_a_glob_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ScheduleError, match=r"select\('h.0'\): no module 'attention\*'; available: attn, mlp"):
        create_schedule(Tied())["h.0"].select("attention*")
    with pytest.raises(
        ScheduleError, match=r"no module 'h.\*.mpl.0'; did you mean 'h.\*.mlp'\?; available: h.\*.attn, h.\*.mlp"
    ):
        create_schedule(Tied()).select("h.*.mpl.0")
    with pytest.raises(ScheduleError, match=r"select\(''\): no module 'wpe'; did you mean 'wte'\?"):
        create_schedule(Tied()).select("wpe")


def test_named_schedules_visits_every_module_once() -> None:
    model = Tied()
    assert [handle.mod for _, handle in create_schedule(model).named_schedules()] == list(model.modules())


def test_a_handle_follows_its_path_after_a_rewrite() -> None:
    sch = create_schedule(Tied())
    act, inner = sch["h.0.mlp.1"], sch["h.0.mlp.0"]
    act.replace(make(nn.ReLU))
    assert isinstance(act.mod, nn.ReLU)
    sch["h.0.mlp"].replace(nn.Sequential())
    with pytest.raises(ScheduleError, match=r"the module 'h.0.mlp.0' is gone"):
        _ = inner.mod


def test_tied_parameters_know_both_names() -> None:
    model = Tied()
    sch = create_schedule(model)
    assert sch.original_names["wte.weight"] == ("wte.weight", "head.weight")
    assert list(sch.metadata.tie_weights) == [model.wte.weight]


def test_a_built_schedule_keeps_no_replaced_tied_parameter() -> None:
    model = Tied()
    sch, whole = create_schedule(model), weakref.ref(model.wte.weight)
    model.wte.weight = model.head.weight = nn.Parameter(torch.zeros_like(model.wte.weight))
    build(sch)
    assert whole() is None


def test_names_are_the_unmodified_models_after_wrapping() -> None:
    model = Tied()
    sch = create_schedule(model)
    sch["h.0.attn"].replace(nn.Sequential(model.h[0].attn))
    assert sch.original_names["h.0.attn.0.weight"] == ("h.0.attn.weight",)


def test_a_parent_gives_a_handle_of_the_same_schedule() -> None:
    model = Tied()
    sch = create_schedule(model)
    assert create_schedule(model.h[0], path="h.0", parent=sch) == sch["h.0"]
    with pytest.raises(ScheduleError, match="is another one"):
        create_schedule(model.h[1], path="h.0", parent=sch)


def test_the_class_starts_a_schedule_too() -> None:
    model = Tied()
    sch = Schedule(model, name="top")
    assert (sch.mod, sch.name) == (model, "top")
    assert Schedule(model.h[0], "0", "h.0", sch) == sch["h.0"]


def test_only_modules_can_be_scheduled() -> None:
    with pytest.raises(ScheduleError, match="cannot schedule a function; give an nn.Module"):
        create_schedule(is_module_list)  # type: ignore[arg-type]


def test_one_process_is_a_group_of_one() -> None:
    sch = create_schedule(Tied())
    assert (sch.group, sch.rank, sch.world_size, sch.mesh) == (None, 0, 1, None)


def test_a_list_of_modules_is_recognised() -> None:
    container = nn.Module()
    container.add_module("0", nn.ReLU())
    assert is_module_list(nn.ModuleList([nn.ReLU()]))
    assert is_module_list(container)
    assert not is_module_list(nn.ReLU())
    assert not is_module_list(Tied())


def test_primitives_are_listed_as_methods() -> None:
    sch = create_schedule(Tied())
    assert {"replace", "replace_all", "annotate"} <= set(dir(sch))
    assert (sch.replace.__doc__ or "").startswith("Replace this module")
    assert not hasattr(sch, "no_such_primitive")
    assert not hasattr(sch, "_private")


def test_a_deep_copy_of_a_schedule_keeps_what_is_known() -> None:
    sch = create_schedule(Tied())
    sch["h.0.attn"].annotate("weight", "no_decay", True)
    parameter_facts(sch["wte"].mod.weight).tags.add("tag")
    other = copy.deepcopy(sch)
    assert other.mod is not sch.mod
    assert other.original_names == sch.original_names
    assert other["h.0.attn"].mod.weight.no_decay is True
    assert parameter_facts(other["head"].mod.weight).tags == {"tag"}
    assert "annotate" in other["h.0.attn"].metadata.primitives
    assert str(other.journal) == str(sch.journal)
    other["h.0"].replace(nn.Identity())
    assert isinstance(sch["h.0"].mod, Block)
    with pytest.raises(ScheduleError, match="no step to undo"):
        copy.deepcopy(sch).undo()
