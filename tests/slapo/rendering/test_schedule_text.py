"""``print(sch)``: what was done where, in a tree that is short where a model repeats itself."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parameter import UninitializedParameter

import slapo
import slapo.plugin
import slapo_memory.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Primitive, Registry, create_schedule
from tests.slapo.rendering.small_models import Block, Tied


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Rank 1 of a group of two that sends nothing."""
    dist.init_process_group("fake", rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def shown(sch: object) -> str:
    """The text, without spaces at the ends."""
    lines = str(sch).splitlines()
    assert all(len(line) <= 100 for line in lines)
    return "\n".join(lines)


def tree(sch: object) -> str:
    """The module tree alone."""
    return shown(sch).partition("\n\n")[2]


def golden(text: str) -> str:
    return cleandoc(text)


def test_steps_stand_at_their_modules_and_alike_neighbours_are_folded() -> None:
    sch = create_schedule(Tied())
    sch["h.1"].checkpoint()
    assert shown(sch) == golden("""
        Tied
        parameters  328; float32 on cpu
        steps       checkpoint
        tied        emb.weight = head.weight

        328  Tied
         40    emb: Embedding(10, 4)  weight [10, 4] = head.weight
        288    h: ModuleList
         72      0: Block  (3 modules inside)
         72      1: Block  <- checkpoint  (inside as in h.0)
        144      2-3: 2 x Block  (inside as in h.0)
               head: Linear(in_features=4, out_features=10, bias=False)  weight [10, 4] = emb.weight
    """)


def test_without_steps_everything_is_open() -> None:
    assert tree(create_schedule(Tied(3))) == golden("""
        256  Tied
         40    emb: Embedding(10, 4)  weight [10, 4] = head.weight
        216    h: ModuleList
        216      0-2: 3 x Block
         40        fc: Linear(in_features=4, out_features=8, bias=True)  weight [8, 4], bias [8]
                   act: GELU(approximate='none')
         32        proj: Linear(in_features=8, out_features=4, bias=False)  weight [4, 8]
               head: Linear(in_features=4, out_features=10, bias=False)  weight [10, 4] = emb.weight
    """)


@pytest.mark.usefixtures("two_ranks")
def test_a_shard_is_shown_as_a_part_of_the_whole() -> None:
    sch = create_schedule(Block(), mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
    sch["fc"].shard("weight", axis=0)
    sch["fc"].shard("bias", axis=0)
    sch["fc"].sync("bwd_post", "all_reduce")
    sch["proj"].shard("weight", axis=1)
    sch["proj"].sync(mode="fwd_post", sync_op_or_fn="all_reduce")
    assert shown(sch) == golden("""
        Block
        parameters  72, of which 36 on this rank; float32 on cpu
        ranks       mesh dp 1 x tp 2 on cpu; this is rank 1 (dp 0, tp 1)
        steps       5: 3 shard, 2 sync

        36 of 72  Block
        20 of 40    fc: Linear(in_features=4, out_features=4, bias=True)
                        weight [4 of 8, 4] tp 2, bias [4 of 8] tp 2
                        <- shard(weight, axis=0), shard(bias, axis=0), sync(bwd_post, all_reduce)
                    act: GELU(approximate='none')
        16 of 32    proj: Linear(in_features=4, out_features=4, bias=False)
                        weight [4, 4 of 8] tp 2
                        <- shard(weight, axis=1), sync(mode=fwd_post, sync_op_or_fn=all_reduce)
    """)


@pytest.mark.usefixtures("two_ranks")
def test_what_a_step_did_to_other_modules_stands_there_and_is_counted_here() -> None:
    sch = create_schedule(Tied(2), example_inputs=torch.zeros(1, 3, dtype=torch.long))
    sch.tensor_parallel(plan={"h.*.fc": "colwise", "h.*.proj": "rowwise"})
    text = shown(sch)
    assert "steps       tensor_parallel" in text
    assert "Tied  <- tensor_parallel(plan={h.*.fc: colwise, h.*.proj: rowwise}): " in text
    assert "a group of 2 ranks; this is rank 1 of it" in text
    assert "0-1: 2 x Block" in text
    assert text.count("weight [4 of 8, 4] tp 2") == 1


def test_a_stage_ends_at_a_cut() -> None:
    sch = create_schedule(Tied(3))
    sch["h.0"].cut_pipeline_stage()
    sch["head"].cut_pipeline_stage(where="before")
    assert "stages      3, when it is built" in shown(sch)
    assert tree(sch) == golden("""
        256  Tied
         40    emb: Embedding(10, 4)  weight [10, 4] = head.weight
        216    h: ModuleList
         72      0: Block  <- cut_pipeline_stage  (3 modules inside)
                 - - - stage border - - -
        144      1-2: 2 x Block  (inside as in h.0)
               - - - stage border - - -
               head: Linear(in_features=4, out_features=10, bias=False)
                   weight [10, 4] = emb.weight
                   <- cut_pipeline_stage(where=before)
    """)


def test_a_stage_can_begin_and_end_with_one_module() -> None:
    sch = create_schedule(Tied(3))
    sch["h.1"].cut_pipeline_stage().cut_pipeline_stage("before")
    border = " " * 9 + "- - - stage border - - -"
    cut = " 72      1: Block  <- cut_pipeline_stage, cut_pipeline_stage(before)  (inside as in h.0)"
    assert f"{border}\n{cut}\n{border}" in tree(sch)


def test_many_steps_and_parameters_are_counted() -> None:
    sch = create_schedule(nn.Sequential(nn.RNN(1, 1, num_layers=2)))
    for number in range(20):
        sch["0"].annotate("bias_hh_l0", f"mark{number}", number)
    assert "bias_hh_l0 [1], weight_ih_l1 [1, 1], weight_hh_l1 [1, 1], 2 more" in " ".join(shown(sch).split())
    assert "annotate(bias_hh_l0, mark11, 11), 8 more" in " ".join(shown(sch).split())


def test_after_build_the_stages_are_those_of_the_program() -> None:
    sch = create_schedule(Tied(2), example_inputs=torch.zeros(1, 3, dtype=torch.long))
    sch["h.0"].cut_pipeline_stage()
    slapo.build(sch)
    text = shown(sch)
    assert "stages      2, as built" in text
    assert "0: Block  <- cut_pipeline_stage  (stage 0; 3 modules inside)" in text
    assert "1: Block  (stage 1; inside as in h.0)" in text
    assert "parameters  184; float32 on cpu" in text


def test_a_handle_shows_its_module_alone() -> None:
    sch = create_schedule(Tied(2))
    sch["h.0"].checkpoint()
    assert shown(sch["h.0"]) == golden("""
        Block at h.0
        parameters  72; float32 on cpu
        steps       checkpoint

        72  Block  <- checkpoint
        40    fc: Linear(in_features=4, out_features=8, bias=True)  weight [8, 4], bias [8]
              act: GELU(approximate='none')
        32    proj: Linear(in_features=8, out_features=4, bias=False)  weight [4, 8]
    """)
    assert shown(sch["h.1"]["act"]) == "GELU at h.1.act\nparameters  none\nsteps       none\n\nGELU(approximate='none')"


def test_a_handle_whose_module_is_gone_says_so_and_its_steps_stay_in_sight() -> None:
    sch = create_schedule(Tied(2))
    inner = sch["h.0.fc"]
    inner.checkpoint()
    sch["h.0"].replace(nn.Identity())
    assert shown(inner) == golden("""
        the module 'h.0.fc' is gone; a step removed it after this handle
        steps  checkpoint
    """)
    assert "gone modules  h.0.fc: checkpoint" in shown(sch)
    assert "0: Identity  <- replace(Identity())" in shown(sch)


def test_steps_on_a_replaced_module_are_not_those_of_the_new_one() -> None:
    sch = create_schedule(Tied(2))
    sch["h.0.fc"].checkpoint()
    sch["h.0"].checkpoint()
    sch["h.0"].replace(Block())
    assert "0: Block  <- replace(Block())" in tree(sch)
    assert "checkpoint" not in tree(sch)
    assert "gone modules  h.0.fc: checkpoint, h.0: checkpoint" in shown(sch)


def test_a_model_that_is_replaced_is_named() -> None:
    sch = create_schedule(Block())
    sch.checkpoint()
    sch.replace(Block())
    assert "gone modules  the model: checkpoint" in shown(sch)


def test_only_consecutive_numbers_are_a_range() -> None:
    sch = create_schedule(nn.ModuleDict({name: nn.ReLU() for name in ("1", "3", "9")}))
    assert "1, 3, 9: 3 x ReLU" in tree(sch)


def test_a_shared_module_is_shown_once() -> None:
    block = Block()
    sch = create_schedule(nn.ModuleDict({"a": block, "b": nn.Sequential(block, nn.ReLU())}))
    assert tree(sch).splitlines()[-3:] == [
        "      b: Sequential",
        "        0: Block  (the module of a)",
        "        1: ReLU",
    ]


def test_an_inside_is_shown_once_in_the_whole_model_if_its_names_are_the_same_too() -> None:
    def inside(*names: str) -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(1, 1 + index) for index, name in enumerate(names)})

    model = {"one": inside("q", "k", "v"), "two": nn.Sequential(inside("a", "b", "c"), inside("q", "k", "v"))}
    text = tree(create_schedule(nn.ModuleDict(model)))
    assert "1: ModuleDict  (inside as in one)" in text
    assert "a: Linear" in text


def test_a_traced_module_has_its_steps() -> None:
    sch = create_schedule(Tied(1), example_inputs=torch.zeros(1, 3, dtype=torch.long))
    sch["h.0"].trace()
    assert "0: TracedBlock  <- trace" in shown(sch)


def test_parameters_without_memory_or_gradient_are_marked() -> None:
    with torch.device("meta"):
        model = Block()
    model.proj.requires_grad_(False)
    sch = create_schedule(model)
    assert "parameters  72; float32 on meta" in shown(sch)
    assert "weight [8, 4] meta, bias [8] meta" in shown(sch)
    assert "weight [4, 8] meta frozen" in shown(sch)


def test_a_lazy_parameter_has_no_shape_yet() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    assert isinstance(model[0].weight, UninitializedParameter)
    assert "weight without a shape yet" in shown(create_schedule(model))


def test_names_and_settings_do_not_reach_the_terminal_as_they_are() -> None:
    class Odd(nn.Module):
        def extra_repr(self) -> str:
            return "two\nlines, \x1b[31mred, " + "long" * 40

    model = nn.Module()
    model._modules["a\nb\x1b[0m"] = Odd()
    text = shown(create_schedule(model))
    assert "\x1b" not in text
    assert r"a\nb\x1b[0m: Odd(two lines, \x1b[31mred, longlong" in text
    assert len(text.splitlines()) == 6


def test_settings_that_cannot_be_read_are_left_out() -> None:
    class Broken(nn.Module):
        def extra_repr(self) -> str:
            raise RuntimeError("half made")

    assert "0: Broken" in shown(create_schedule(nn.Sequential(Broken())))


def test_arguments_are_short_and_no_foreign_repr_runs() -> None:
    class Loud:
        def __repr__(self) -> str:
            raise AssertionError("called")

    class Take(Primitive):
        name = "take"

        @staticmethod
        def apply(schedule: slapo.Schedule, *args: object, **kwargs: object) -> None:
            """Take anything."""

    class Plugin:
        @slapo.hookimpl
        def slapo_primitives(self) -> dict[str, type]:
            return {"take": Take}

    registry = Registry([slapo.plugin, Plugin()])
    sch = create_schedule(nn.Sequential(nn.ReLU()), plugins=registry)
    sch["0"].take(Loud(), nn.GELU(), torch.zeros(2), nn.Linear, [1, 2, 3, 4], {"a b": None}, torch.bfloat16, len)
    assert "<- take(<Loud>, GELU(), a tensor, Linear, [1, 2, 3, ...], {'a b': None}, bfloat16, len)" in shown(sch)


def test_a_long_list_is_cut_off_and_a_deep_tree_is_closed() -> None:
    sch = create_schedule(nn.Sequential(*[nn.Linear(1, 1 + index % 250) for index in range(500)]))
    assert shown(sch).endswith("... 400 more")
    wide = nn.Sequential(*[nn.Sequential(*[nn.Linear(1, 1 + a * 20 + b) for b in range(20)]) for a in range(20)])
    assert "19: Sequential  (20 modules inside)" in shown(create_schedule(wide))


def test_narrow_terminals_are_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    sch = create_schedule(Tied())
    for block in sch["h"].child.values():
        block["fc"].shard("weight", 0)
    assert max(map(len, str(sch).splitlines())) <= 60


def test_repr_stays_one_line_and_no_plugin_is_needed() -> None:
    sch = create_schedule(Tied(1), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_memory.plugin]))
    sch["h.0"].checkpoint()
    assert repr(sch) == "Schedule('': Tied)"
    assert str(sch) == "Schedule('': Tied)\nsch['h.0'].checkpoint()"
