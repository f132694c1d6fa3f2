"""From a schedule to an engine: look-up, refusals before anything happens, events."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slapo.framework_dialect import get_dialect_cls, init_target_engine
from slapo_core import (
    BuildError,
    Dialect,
    Engine,
    Program,
    Schedule,
    ScheduleError,
    UnknownNameError,
    build,
    build_program,
    create_schedule,
    hookimpl,
    init_empty_weights,
    make,
)
from slapo_testing import isolated_plugins, run_distributed


class Recorded(Engine):
    def __init__(self, program: Program, config: dict[str, Any]) -> None:
        self.module, self.optimizer, self.config = program.module, None, config

    def train_batch(self, **batch: Any) -> torch.Tensor: ...
    def eval_batch(self, **batch: Any) -> torch.Tensor: ...
    def save(self, path: Any) -> None: ...
    def load(self, path: Any) -> None: ...


class Toy(Dialect):
    """Records what it is given."""

    name = "toy"
    capabilities = frozenset({"precision:fp32"})
    classes = {"runtime_engine": Recorded}

    @classmethod
    def build(cls, program: Program, **config: Any) -> Engine:
        return Recorded(program, config)


class Plugin:
    def __init__(self) -> None:
        self.events: list[Any] = []

    @hookimpl
    def slapo_dialects(self) -> dict[str, type]:
        return {"toy": Toy}

    @hookimpl
    def slapo_before_build(self, target: str | None, config: dict[str, Any]) -> None:
        self.events.append(target)
        if config.pop("refuse", False):
            raise BuildError("refused by a plugin")

    @hookimpl
    def slapo_after_build(self, engine: Engine) -> None:
        self.events.append(type(engine).__name__)


@pytest.fixture
def plugin() -> Any:
    plugin = Plugin()
    with isolated_plugins(plugin):
        yield plugin


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


@pytest.mark.usefixtures("plugin")
def test_no_target_gives_the_plain_module() -> None:
    top = model()
    module, optimizer = build(create_schedule(top))
    assert (module, optimizer) == (top, None)
    with pytest.raises(TypeError, match="target=None gives a plain module with no optimizer"):
        build(create_schedule(top)).train_batch()


@pytest.mark.usefixtures("plugin")
def test_arguments_without_use_are_errors() -> None:
    with pytest.raises(BuildError, match="has no use for optimizer, clip"):
        build(create_schedule(model()), optimizer=torch.optim.SGD, clip=1.0)
    with pytest.raises(BuildError, match="has no use for zero"):
        build(create_schedule(model()), zero=1)


def test_a_dialect_gets_the_program_and_the_configuration(plugin: Plugin) -> None:
    top = model()
    engine = init_target_engine(create_schedule(top), "toy", clip=1.0, colour="red")
    assert isinstance(engine, Recorded)
    assert engine.module is top
    assert engine.config == {
        "optimizer": None,
        "loss_fn": None,
        "microbatches": 1,
        "precision": "fp32",
        "clip": 1.0,
        "colour": "red",
    }
    assert plugin.events == ["toy", "Recorded"]


@pytest.mark.usefixtures("plugin")
def test_an_unknown_target_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match=r"no dialect 'tpy'; did you mean 'toy'\?"):
        build(create_schedule(model()), "tpy")


@pytest.mark.usefixtures("plugin")
def test_what_a_dialect_cannot_do_is_refused() -> None:
    with pytest.raises(BuildError, match="target 'toy' cannot do precision:fp16; it can do precision:fp32"):
        build(create_schedule(model()), "toy", precision="fp16")


@pytest.mark.usefixtures("plugin")
def test_a_plugin_may_refuse_and_the_schedule_goes_on() -> None:
    sch = create_schedule(model())
    sch["1"].replace(make(nn.ReLU))
    with pytest.raises(BuildError, match="refused by a plugin"):
        build(sch, "toy", refuse=True)
    sch.undo()
    assert isinstance(sch["1"].mod, nn.GELU)


@pytest.mark.usefixtures("plugin")
def test_build_ends_what_can_be_undone_and_frees_it() -> None:
    sch = create_schedule(model())
    sch["1"].replace(make(nn.ReLU))
    build(sch)
    with pytest.raises(ScheduleError, match="no step to undo since the schedule was built"):
        sch.undo()
    sch["1"].replace(make(nn.SiLU))
    sch.undo()
    assert isinstance(sch["1"].mod, nn.ReLU)
    assert len(sch.journal) == 1


@pytest.mark.usefixtures("plugin")
def test_after_a_build_for_an_engine_there_are_no_more_steps() -> None:
    """They would change the model behind the engine's back."""
    sch = create_schedule(model())
    build(sch, "toy")
    with pytest.raises(ScheduleError, match="replace\\('1'\\): the schedule was built for .toy., whose engine"):
        sch["1"].replace(make(nn.ReLU))
    with pytest.raises(BuildError, match="the schedule was built for 'toy' already"):
        build(sch, "toy")
    with pytest.raises(BuildError, match="cannot build a Linear"):
        build(nn.Linear(2, 2), "toy")  # type: ignore[arg-type]


@pytest.mark.usefixtures("plugin")
def test_a_program_of_one_stage_runs_the_model() -> None:
    top = model()
    program = build_program(create_schedule(top))
    x = torch.randn(2, 4)
    assert torch.equal(program(input=x), top(x))
    assert program.original_names == {"0.weight": ("0.weight",), "0.bias": ("0.bias",)}


@pytest.mark.usefixtures("plugin")
def test_classes_of_a_dialect() -> None:
    assert get_dialect_cls("runtime_engine", "toy") is Recorded
    assert get_dialect_cls("log_parser", "toy", allow_none=True) is None
    with pytest.raises(UnknownNameError, match="no dialect class 'log_parser' of target 'toy'; available: runtime_engine"):
        get_dialect_cls("log_parser", "toy")


@pytest.mark.usefixtures("plugin")
def test_an_unknown_target_is_the_plain_one_where_none_will_do() -> None:
    plain = get_dialect_cls("runtime_engine", "tensorflow", allow_none=True)
    top = model()
    assert type(build(create_schedule(top))) is plain
    assert tuple(plain(top)) == (top, None)
    assert get_dialect_cls("runtime_engine", None) is plain
    assert get_dialect_cls("log_parser", "tensorflow", allow_none=True) is None
    with pytest.raises(UnknownNameError, match="no dialect 'tensorflow'"):
        get_dialect_cls("runtime_engine", "tensorflow")
    with pytest.raises(UnknownNameError, match="no dialect 'None'"):
        get_dialect_cls("log_parser", None)


def of_ones(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


def empty() -> nn.Sequential:
    with init_empty_weights():
        return model()


@pytest.mark.usefixtures("plugin")
def test_weights_get_values_or_not_as_init_weights_says() -> None:
    own, left, ones = (build(create_schedule(empty()), init_weights=given).module for given in (True, None, of_ones))
    assert torch.equal(own[0].weight, build(create_schedule(empty())).module[0].weight)
    assert left[0].weight.is_meta
    assert build(create_schedule(empty()), init_weights=False)[0][0].weight.is_meta
    assert bool((ones[0].weight == 1).all())
    assert bool((build(create_schedule(empty()), None, of_ones).module[0].weight == 1).all())
    assert build(create_schedule(empty()), "toy", init_weights=of_ones).module[0].weight.sum() == 16


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("target", "given", "message"),
    [
        (None, {"init_weights": 3}, "init_weights is 3; give a bool, or a function of a module"),
        (None, {"init_weights": of_ones, "param_init_fn": of_ones}, "init_weights is <function of_ones.*and no param_init_fn"),
        ("toy", {"init_weights": False}, "init_weights is False, and target 'toy' needs values for '0.weight'"),
    ],
)
def test_what_init_weights_cannot_be(target: str | None, given: dict[str, Any], message: str) -> None:
    sch = create_schedule(empty())
    with pytest.raises(BuildError, match=message):
        build(sch, target, **given)
    assert sch.mod[0].weight.is_meta
    assert build(create_schedule(model()), "toy", init_weights=False).module[0].weight.sum() != 0  # it has values


class RefusesOnRankOne:
    @hookimpl
    def slapo_before_build(self) -> None:
        if dist.get_rank() == 1:
            raise BuildError("this rank has no disk")


def build_on_two_ranks(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with isolated_plugins(RefusesOnRankOne()):
        try:
            build(create_schedule(model(), mesh=mesh))
        except BuildError as err:
            return str(err)
    return "built"


@pytest.mark.multiproc
def test_an_error_on_one_rank_fails_all_with_its_message() -> None:
    assert run_distributed(build_on_two_ranks, 2) == ["rank 1 failed: this rank has no disk", "this rank has no disk"]


class Refuses(Plugin):
    @hookimpl
    def slapo_after_build(self, engine: Engine) -> None:
        if dist.get_rank() == 1:
            raise ValueError("rank 1 has no licence")


def after_build_on_two_ranks(rank: int) -> list[str]:
    with isolated_plugins(Refuses()):
        sch = create_schedule(nn.Linear(2, 2), group=dist.group.WORLD)
        messages = []
        for _ in range(2):
            try:
                build(sch, "toy")
                messages.append("built")
            except Exception as err:
                messages.append(str(err))
        return messages


@pytest.mark.multiproc
def test_an_error_after_the_build_fails_all_and_the_schedule_says_that_it_is_spent() -> None:
    for first, second in run_distributed(after_build_on_two_ranks, 2, timeout=30):
        assert "rank 1 has no licence" in first
        assert "the schedule was built for 'toy' already; start a new schedule" in second


def steps_of_one_rank(rank: int, axes: tuple[str, ...]) -> str:
    """A schedule that asks for the rank; the other ranks hold one step less."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=axes) if axes else None
    sch = create_schedule(model(), mesh=mesh)
    sch["1"].replace(make(nn.SiLU))
    if rank == 0:
        sch["1"].replace(make(nn.ReLU))
    return built(sch)


def other_arguments(rank: int) -> str:
    sch = create_schedule(model(), group=dist.group.WORLD)
    sch["1"].replace(make(nn.ELU, alpha=1.0 + rank))
    return built(sch)


def other_options(rank: int) -> str:
    with isolated_plugins(Plugin()):
        return built(create_schedule(model()), target="toy", microbatches=1 + rank)


def other_models(rank: int) -> str:
    return built(create_schedule(nn.Sequential(nn.Linear(2, 2, bias=rank == 0))))


def other_shapes(rank: int) -> str:
    return built(create_schedule(nn.Linear(2, 2 + rank, bias=False)))


def equal_but_for_addresses(rank: int) -> str:
    sch = create_schedule(model())
    sch["0"].annotate("weight", "owner", object())
    return built(sch)


def built(sch: Schedule, **options: Any) -> str:
    try:
        build(sch, **options)
    except BuildError as err:
        return str(err)
    return "built"


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("function", "args", "difference"),
    [
        (
            steps_of_one_rank,
            [("tp",)],
            "step 2, sch['1'].replace(slapo_core.make(torch.nn.modules.activation.ReLU)), on rank 0 and nothing more on rank 1",
        ),
        (steps_of_one_rank, [("dp",)], "on rank 0 and nothing more on rank 1"),
        (steps_of_one_rank, [()], "on rank 0 and nothing more on rank 1"),
        (
            other_arguments,
            [],
            "ELU, alpha=1.0)), on rank 0 and step 1, sch['1'].replace(",
        ),
        (other_options, [], "build('toy') with {'microbatches': 1, 'precision': 'fp32', 'clip': 0.0} on rank 0"),
        (other_models, [], "the parameter '0.bias' of shape (2,) on rank 0 and nothing more on rank 1"),
        (
            other_shapes,
            [],
            "the parameter 'weight' of shape (2, 2) on rank 0 and the parameter 'weight' of shape (3, 2) on rank 1",
        ),
    ],
)
def test_ranks_with_different_schedules_are_refused(function: Any, args: list[Any], difference: str) -> None:
    messages = run_distributed(function, 2, *args)
    assert messages[0] == messages[1]
    assert messages[0].startswith("the ranks have different schedules: ")
    assert difference in messages[0]


@pytest.mark.multiproc
def test_addresses_are_no_difference() -> None:
    assert run_distributed(equal_but_for_addresses, 2) == ["built", "built"]


def without_the_second(rank: int) -> str:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("pp",))
    try:
        create_schedule(nn.Linear(2, 2), mesh=mesh)
    except ScheduleError as error:
        return str(error)
    return "no error"


@pytest.mark.multiproc
def test_a_mesh_that_leaves_out_a_rank_is_refused_there() -> None:
    first, second = run_distributed(without_the_second, 2)
    assert first == "no error"
    assert "the mesh leaves out this rank, 1; make it of all ranks that schedule the model" in second
