"""Wrong arguments of ``save`` and ``load``, and state that a load must include."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, build, create_schedule
from slapo_testing import run_distributed
from slapo_training.checkpoint import digest
from slapo_training.distributed import Ranks

from ..layouts import message_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def engine(seed: int = 0, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    torch.manual_seed(seed)
    sch = create_schedule(nn.Linear(8, 8), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin]))
    optimizer = partial(kind, lr=0.1)
    return build(sch, "torch", optimizer=optimizer, loss_fn=nn.functional.mse_loss, **options)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def test_a_learning_rates_schedule_is_not_left_behind(tmp_path: Path) -> None:
    saved = engine(lr_scheduler=falling)
    saved.train_batch(input=X, labels=X)
    saved.save(tmp_path)
    other = engine(seed=1)
    before = other.module.weight.detach().clone()
    with pytest.raises(BuildError, match="learning-rate schedule is StepLR, the engine's is none; build with the same"):
        other.load(tmp_path)
    assert torch.equal(other.module.weight, before)
    assert other.steps == 0


def test_what_was_loaded_in_inference_mode_trains(tmp_path: Path) -> None:
    saved, other = engine(), engine(seed=1)
    saved.train_batch(input=X, labels=X)
    saved.save(tmp_path)
    with torch.inference_mode():
        other.load(tmp_path)
    assert other.train_batch(input=X, labels=X) == saved.train_batch(input=X, labels=X)


@pytest.mark.parametrize("path", [None, "", b"x", 3, ["x"]], ids=["none", "empty", "bytes", "number", "list"])
def test_paths(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = engine()
    for action in (own.save, own.load):
        with pytest.raises(BuildError, match="the folder of a checkpoint is .*; give a path"):
            action(path)
    assert not [*tmp_path.iterdir()]


def test_whether_to_wait(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="wait is 'no'; give True or False"):
        engine().save(tmp_path, wait="no")


def test_extra_that_contains_itself(tmp_path: Path) -> None:
    extra: dict[str, Any] = {"twice": [(), ()]}
    extra["own"] = extra
    with pytest.raises(BuildError, match="extra, 'own' is a dict that contains itself"):
        engine().save(tmp_path, extra=extra)
    assert not [*tmp_path.iterdir()]


def deep(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (10**5000, "extra has a whole number of 16610 bits; up to 2039 are saved"),
        ([torch.ones(2, device="meta")], "extra has a tensor on the meta device, which has no numbers to save"),
        (deep(3000), "extra has more than 100 lists, tuples or dicts in each other"),
    ],
    ids=["number", "meta", "deep"],
)
def test_extra_that_could_not_be_read_back(extra: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=words):
        engine().save(tmp_path, extra=extra)
    assert not [*tmp_path.iterdir()]


def test_extra_that_just_can(tmp_path: Path) -> None:
    extra = {"long": [2**2039 - 1, -(2**2039 - 1)], "deep": deep(90), "counted": Counter("aab")}
    own = engine()
    own.save(tmp_path, extra=extra)
    found = own.load(tmp_path)
    assert found == extra
    assert type(found["counted"]) is Counter


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"], ids=["long", "null"])
def test_a_folder_of_a_name_that_none_has(name: str, tmp_path: Path) -> None:
    own = engine()
    for action in (own.save, own.load):
        with pytest.raises(BuildError, match="the folder of a checkpoint is .*; give another path"):
            action(tmp_path / name)


@pytest.mark.parametrize("text", ["my notes", '{"a": 1}'])
def test_what_is_called_like_a_checkpoint_is_not_replaced(text: str, tmp_path: Path) -> None:
    (tmp_path / "slapo.json").write_text(text)
    with pytest.raises(
        BuildError, match="has a slapo.json that does not belong to a checkpoint; give another folder, or move it away"
    ):
        engine().save(tmp_path)
    assert (tmp_path / "slapo.json").read_text() == text


def test_an_optimizer_that_no_engine_steps() -> None:
    with pytest.raises(BuildError, match="LBFGS computes the loss several times in a step, which no engine does"):
        engine(kind=torch.optim.LBFGS)


def test_a_buffer_that_was_expanded_comes_back(tmp_path: Path) -> None:
    saved, other = engine(), engine(seed=1)
    for own, value in ((saved, 3.0), (other, 0.0)):
        own.module.register_buffer("many", torch.tensor([value]).expand(4))
        own.train_batch(input=X, labels=X)
    saved.save(tmp_path)
    other.load(tmp_path)
    assert other.module.many.tolist() == [3.0] * 4
    assert other.train_batch(input=X, labels=X) == saved.train_batch(input=X, labels=X)


def test_extra_is_told_apart_by_every_number_and_by_no_order_of_a_set() -> None:
    large = torch.zeros(5000)
    other = large.clone()
    other[2500] = 1
    assert digest({"seen": large}) == digest({"seen": large.clone()}) != digest({"seen": other})
    one, same = set([0, 8]), set([8, 0])  # noqa: C405  a literal is put in order
    assert repr(one) != repr(same)
    assert digest([one]) == digest([same]) != digest([{0, 9}])
    assert digest(large) != digest(large.double())
    assert len({digest(each) for each in (1, 1.0, True, "1", b"1", None, [1], (1,), {1}, {1: 1}, [[1]], [1, 1])}) == 12


def in_part_of_the_world(rank: int) -> list[str]:
    """Return messages of background saves on a mesh that leaves one rank out, if one rank or each has one more group."""
    mesh = DeviceMesh("cpu", [[[0]], [[1]]], mesh_dim_names=("pp", "dp", "tp"))
    messages = []
    for members in ([0], [1]):
        if rank in members:
            dist.new_group(members, use_local_synchronization=True)
        if rank < 2:
            messages.append(message_of(lambda: Ranks(rank, 2, mesh).in_new_group().run_on_all(lambda: None)))
    return messages


@pytest.mark.multiproc
def test_ranks_that_cannot_make_a_group_for_a_save_are_told() -> None:
    first, second, _ = run_distributed(in_part_of_the_world, 3)
    assert first == second
    assert "are in different numbers of process groups" in first[0]
    assert first[1] == "no error"
