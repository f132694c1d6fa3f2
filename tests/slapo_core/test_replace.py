"""``replace``, ``replace_all``, ``annotate``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import ScheduleError, UnknownNameError, create_schedule, make, parameter_facts


class Twins(nn.Module):
    """One activation at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU()
        self.first = nn.Sequential(nn.Linear(4, 4), self.act)
        self.second = nn.Sequential(nn.Linear(4, 4), self.act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_shared_module_is_replaced_at_every_place_and_put_back() -> None:
    model = Twins()
    sch = create_schedule(model)
    old, new = model.act, nn.ReLU()
    sch["second.1"].replace(new)
    assert model.act is new
    assert model.first[1] is new
    assert model.second[1] is new
    sch.undo()
    assert model.act is old
    assert model.first[1] is old


def test_correctness_07_hooks_training_mode_frozen_parameters_and_names_carry_over() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    model[0].weight.requires_grad_(False)
    sch = create_schedule(model)
    new = nn.Linear(4, 4)
    sch["0"].replace(new)
    model(torch.ones(1, 4))
    assert calls == ["hook"]
    assert not new.training
    assert not new.weight.requires_grad
    assert new.bias.requires_grad
    assert parameter_facts(new.weight).names == ("0.weight",)
    sch.undo()
    assert new.training
    assert new.weight.requires_grad
    assert not new._forward_hooks


def test_correctness_07_a_wrapper_does_not_run_the_hooks_of_what_it_wraps_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    create_schedule(model)["0"].replace(nn.Sequential(model[0]))
    model(torch.ones(1, 4))
    assert calls == ["hook"]


def test_a_parameter_of_another_shape_is_not_the_originals() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sch = create_schedule(model)
    sch["0"].replace(nn.Linear(4, 6))
    assert sch.original_names == {"0.weight": (), "0.bias": ()}


def test_the_top_module_can_be_replaced() -> None:
    old, new = nn.Linear(4, 4), nn.Identity()
    sch = create_schedule(old)
    sch.replace(new)
    assert sch.mod is new
    sch.undo()
    assert sch.mod is old


def test_replacing_by_something_else_is_an_error() -> None:
    model = Twins()
    sch = create_schedule(model)
    with pytest.raises(ScheduleError, match=r"replace\('act'\): 3 is not a module"):
        sch["act"].replace(3)
    with pytest.raises(ScheduleError, match="contains the whole model"):
        sch["act"].replace(nn.Sequential(model))
    with pytest.raises(ScheduleError, match="the subgraph is empty"):
        sch.replace(nn.ReLU(), [])


def relu_for(old: nn.Module) -> nn.Module:
    return nn.ReLU()


def test_replace_all_by_class_makes_one_module_per_old_one() -> None:
    model = nn.Sequential(nn.GELU(), nn.Sequential(nn.GELU(), nn.Linear(2, 2)))
    sch = create_schedule(model)
    sch.replace_all(nn.GELU, relu_for)
    assert isinstance(model[0], nn.ReLU)
    assert isinstance(model[1][0], nn.ReLU)
    assert model[0] is not model[1][0]
    sch.undo()
    assert isinstance(model[0], nn.GELU)
    assert isinstance(model[1][0], nn.GELU)


def test_replace_all_keeps_a_shared_module_shared() -> None:
    model = Twins()
    create_schedule(model).replace_all(nn.GELU, relu_for)
    assert isinstance(model.act, nn.ReLU)
    assert model.act is model.first[1] is model.second[1]


def test_replace_all_by_glob_leaves_what_is_inside_a_replaced_one() -> None:
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.GELU())))
    made: list[nn.Module] = []

    def keep(old: nn.Module) -> nn.Module:
        made.append(old)
        return nn.Identity()

    create_schedule(model).replace_all("**.0", keep)
    assert len(made) == 1
    assert isinstance(model[0], nn.Identity)


def test_replace_all_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="nothing below matches 'h.*'"):
        create_schedule(nn.Sequential(nn.GELU())).replace_all("h.*", relu_for)


def test_replace_all_is_undone_when_a_module_cannot_be_made() -> None:
    model = nn.Sequential(nn.GELU(), nn.GELU(), nn.GELU())
    made = iter([nn.ReLU(), nn.ReLU(), "no module"])
    with pytest.raises(ScheduleError, match=r"replace_all\('2'\): 'no module' is not a module"):
        create_schedule(model).replace_all(nn.GELU, lambda old: next(made))
    assert all(isinstance(module, nn.GELU) for module in model)


def sized(path: str, old: nn.Linear, *, bias: bool) -> nn.Module:
    """Make a module from the arguments that a classic script gives."""
    made = nn.Linear(old.in_features, old.out_features, bias=bias)
    made.path = path
    return made


def test_replace_all_gives_a_function_of_two_the_path_and_both_its_keywords() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 4)))
    sch = create_schedule(nn.Sequential(model))
    sch["0"].replace_all(nn.Linear, sized, bias=False)
    assert [(each.path, each.out_features, each.bias) for each in (model[0], model[1][0])] == [("0", 2, None), ("1.0", 4, None)]
    sch.undo()
    assert model[0].bias is not None


@pytest.mark.parametrize("make", [sized, lambda: nn.ReLU()], ids=["a keyword missing", "no argument"])
def test_replace_all_refuses_a_function_that_cannot_be_called_so(make: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(ScheduleError, match=r"is called with \(module\) or \(path, module\), and with scale by name; give a"):
        create_schedule(model).replace_all(nn.Linear, make, scale=2)
    assert isinstance(model[0], nn.Linear)


def test_an_annotation_stays_with_the_parameter() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sch = create_schedule(model)
    sch["0"].annotate("weight", "no_decay", True)
    assert model[0].weight.no_decay is True
    assert sch["0"].metadata.param_tags == {"no_decay"}
    sch.undo()
    assert not hasattr(model[0].weight, "no_decay")


def test_tags_are_a_set_that_one_adds_to_and_go_on_to_the_parameter_that_comes_in_the_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.no_decay, model[0].bias.scratch, model[1].weight.no_decay = True, 1, "own"
    sch = create_schedule(model)
    sch["0"].metadata.param_tags.add("no_decay")
    new = nn.Linear(4, 4)
    sch["0"].replace(new)
    assert new.weight.no_decay is True
    assert not hasattr(new.bias, "scratch")  # nobody said that it matters
    sch.undo()
    assert not hasattr(new.weight, "no_decay")
    kept = nn.Linear(4, 4)
    kept.weight.no_decay = False
    sch["1"].replace(kept)
    assert kept.weight.no_decay is False


def test_a_tag_that_is_added_after_a_step_outlives_its_undo() -> None:
    sch = create_schedule(nn.Sequential(nn.Linear(4, 4)))
    sch["0"].annotate("weight", "expert", True)
    sch["0"].metadata.param_tags.add("no_decay")
    sch.undo()
    assert sch["0"].metadata.param_tags == {"no_decay"}


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("wait", "k", "no parameter or buffer 'wait'; it has: weight, bias"),
        ("weight", "grad", "'grad' is not a free attribute name"),
    ],
)
def test_a_wrong_annotation_is_an_error(name: str, key: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        create_schedule(nn.Sequential(nn.Linear(4, 4)))["0"].annotate(name, key, 1)


def test_make_builds_as_written() -> None:
    assert make(nn.Linear, 4, 8, bias=False).weight.shape == (8, 4)


def test_replace_all_that_casts_the_old_modules_is_undone() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    values = model[0].weight.detach().clone()
    sch = create_schedule(model)
    sch.replace_all(nn.Linear, lambda old: old.half())
    assert model[0].weight.dtype == torch.half
    sch.undo()
    assert torch.equal(model[0].weight, values)


def test_a_parameter_that_lives_on_in_the_new_module_keeps_its_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    old = model[0].weight.requires_grad_(False)
    new = nn.Linear(4, 4, bias=False)
    new.register_parameter("frozen", old)
    create_schedule(model)["0"].replace(new)
    assert parameter_facts(new.weight).names == ()
    assert parameter_facts(old).names == ("0.weight",)
    assert new.weight.requires_grad


def test_a_tie_that_a_replacement_ends_leaves_each_its_own_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    sch = create_schedule(model)
    sch["1"].replace(nn.Linear(4, 4, bias=False))
    state = sch.full_state()
    assert torch.equal(state["0.weight"], model[0].weight)
    assert torch.equal(state["1.weight"], model[1].weight)
    sch.undo()
    assert sch.original_names == {"0.weight": ("0.weight", "1.weight")}


class Gated(nn.Module):
    """Two sums that are rewritten alike."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1).relu() * (x + 2).relu()


class AddReLU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1).relu()


class AddTwoReLU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 2).relu()


def test_a_subgraph_s_module_is_found_by_its_class_or_name_and_number() -> None:
    sch = create_schedule(nn.Sequential(Gated()))
    sch.trace()
    gated = sch["0"]
    gated.replace(AddReLU(), lambda x: (x + 1).relu())
    assert (gated["AddReLU_0"].path, "AddReLU_0" in gated, "AddReLU_1" in gated) == ("0.addrelu", True, False)
    gated["AddReLU_0"].replace(nn.Sequential(AddReLU()))
    assert sch["0.Sequential_0.0"].path == "0.addrelu.0"
    gated.replace(AddTwoReLU(), gated.find(lambda x: (x + 2).relu()), "Second")
    assert sch["0.AddTwoReLU_0"].mod is sch["0.Second_0"].mod is gated["Second"].mod
    sch.undo()
    assert "Second_0" not in gated
    with pytest.raises(UnknownNameError, match="no module '0.Gated_0'"):
        gated["Gated_0"]
