"""``build(..., weights=...)`` that ranks are given differently, and what a build that fails behind it leaves."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import slapo
from slapo_core import BuildError
from slapo_testing import run_distributed
from slapo_weights.load import Weights
from slapo_weights.safetensors_files.reader import WeightFiles
from tests.slapo_torch.layouts import mesh_of, message_of

X = torch.ones(4, 4)
SGD = partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    """Has a buffer that is read with the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(input))


def saved(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model = Net()
    model.norm.running_mean.fill_(3.0)  # type: ignore[operator,union-attr]
    slapo.export_weights(slapo.create_schedule(model), folder)
    return folder


def given(rank: int, one: Any, other: Any) -> tuple[str, bool]:
    """Return the error of a build, and whether the model is still on the meta device."""
    with slapo.init_empty_weights():
        model = Net()
    sch = slapo.create_schedule(model, mesh=mesh_of(dp=2))
    return message_of(lambda: slapo.build(sch, "torch", weights=other if rank else one)), model.a.weight.is_meta


@pytest.mark.multiproc
def test_ranks_that_are_given_different_weights_are_told_before_any_is_read(tmp_path: Path) -> None:
    one, other = saved(tmp_path / "one"), saved(tmp_path / "other", seed=1)
    for wrong, words in [
        (None, "nothing more on rank 1"),
        (other, "have different schedules: weights of digest"),
        (Weights(one, missing="*"), "missing='*'"),
        (tmp_path / "none", "no weights at"),
    ]:
        for message, is_empty in run_distributed(given, 2, one, wrong):
            assert words in message
            assert is_empty
    shutil.copytree(one, tmp_path / "copy")
    assert run_distributed(given, 2, one, tmp_path / "copy") == [("no error", False)] * 2


def test_a_digest_is_of_what_is_in_files_and_not_of_how_many_there_are(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(64), "b": torch.randn(3, 5).half(), "c": torch.zeros(0), "d": torch.tensor(1)}
    save_file(tensors, tmp_path / "one.safetensors")
    digest = WeightFiles(tmp_path / "one.safetensors").digest()
    slapo.export_weights(slapo.create_schedule(Net()), tmp_path / "whole")
    slapo.export_weights(slapo.create_schedule(Net()), tmp_path / "other")
    assert WeightFiles(tmp_path / "whole").digest() != WeightFiles(tmp_path / "other").digest()
    for name, changed in [("a", -tensors["a"]), ("b", tensors["b"].float()), ("c", torch.zeros(0, 2)), ("d", torch.tensor(2))]:
        save_file({**tensors, name: changed}, tmp_path / "two.safetensors")
        assert WeightFiles(tmp_path / "two.safetensors").digest() != digest
    save_file(dict(reversed(tensors.items())), tmp_path / "two.safetensors")
    assert WeightFiles(tmp_path / "two.safetensors").digest() == digest


@pytest.mark.parametrize(
    "wrong",
    [{"optimizer": lambda parameters: None}, {"optimizer": SGD, "lr_scheduler": lambda optimizer: 3}],
    ids=["optimizer", "schedule"],
)
def test_a_build_that_fails_leaves_the_model_without_values(wrong: Any, tmp_path: Path) -> None:
    saved(tmp_path)
    with slapo.init_empty_weights():
        model = Net()
    sch = slapo.create_schedule(model)
    with pytest.raises(BuildError, match="gave a"):
        slapo.build(sch, "torch", weights=tmp_path, **wrong)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.norm.running_mean.tolist() == [0.0] * 4  # type: ignore[union-attr,operator]
    engine = slapo.build(sch, "torch", weights=tmp_path, optimizer=SGD, loss_fn=nn.functional.mse_loss)
    assert engine.module.norm.running_mean.tolist() == [3.0] * 4  # type: ignore[attr-defined]
    assert engine.train_batch(input=X, labels=X).isfinite()
