"""The folder of a checkpoint: what is left of a crash, what is not ours, and who may write there."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, build, create_schedule
from slapo_testing import run_distributed
from slapo_training.checkpoint import CheckpointWriter
from slapo_training.checkpoint.folder import open_checkpoint, read_context, verify
from slapo_training.distributed import Ranks
from slapo_training.distributed._torch_private import job_timeout
from tests.background_saves import fail, held_back

from ..counting_engine import BATCH, Counts, engine_of
from ..layouts import mesh_of


def test_what_a_crash_leaves_is_no_checkpoint_and_is_removed(tmp_path: Path) -> None:
    engine = engine_of()
    engine.save(tmp_path)
    (data,) = tmp_path.glob("data-*")
    number = uuid.uuid4().hex
    shutil.copytree(data, tmp_path / f"data-{number}")
    (tmp_path / f"slapo.json.{number}").write_text((tmp_path / "slapo.json").read_text())
    engine.load(tmp_path)
    (tmp_path / "slapo.json").rename(tmp_path / "gone")
    with pytest.raises(BuildError, match="is not a complete checkpoint of target 'torch': it has no slapo.json"):
        engine.load(tmp_path)
    engine.save(tmp_path)
    assert len([*tmp_path.glob("data-*")]) == len([*tmp_path.glob("slapo.json*")]) == 1
    engine.load(tmp_path)


def test_what_is_only_called_like_it_stays(tmp_path: Path) -> None:
    engine, own = (
        engine_of(),
        [tmp_path / name for name in ("data-2024/rows.bin", "data-202401011234/rows.bin", "slapo.json.bak")],
    )
    for file in own:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    for _ in range(2):
        engine.save(tmp_path)
    assert [file.read_text() for file in own] == ["mine"] * 3
    assert len([*tmp_path.iterdir()]) == 6


def test_only_the_first_rank_removes_what_broke_off_and_never_what_is_in_place(tmp_path: Path) -> None:
    """Another rank may give up waiting while the first one puts it there."""
    writing = CheckpointWriter.from_proposals([CheckpointWriter.propose(tmp_path, "torch")], "torch")
    writing.begin(Ranks())
    (writing.data / "file").write_text("content")

    def breaks_off(place: int) -> bool:
        with pytest.raises(KeyboardInterrupt), writing.cleanup_on_error(Ranks(place, 2)):
            raise KeyboardInterrupt
        return writing.data.exists()

    assert breaks_off(place=1)
    writing.commit({}, Ranks())
    assert breaks_off(place=0)
    (tmp_path / "slapo.json").unlink()
    assert not breaks_off(place=0)


def test_a_folder_is_where_it_was_when_a_save_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    (tmp_path / "first").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    with held_back() as gate:
        saving = engine.save("checkpoint", wait=False)
        monkeypatch.chdir(tmp_path)
        gate.set()
        saving.wait()
    engine.load("first/checkpoint")


def test_a_last_save_that_nobody_waits_for_does_not_fail_unheard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engine_of()
    with held_back() as gate:
        saving = engine.save(tmp_path, wait=False)
        monkeypatch.setattr(Path, "write_bytes", fail)
        gate.set()
        while not saving.done():
            time.sleep(0.01)
    told = capsys.readouterr().err
    assert (
        f"ERROR Slapo: in the background: the checkpoint {os.fspath(tmp_path)!r} was not written, and what was there is" in told
    )
    assert told.rstrip().endswith(": No space left on device")


def test_a_folder_takes_one_save_at_a_time(tmp_path: Path) -> None:
    engine, other = engine_of(), engine_of()
    engine.module.fill(1.0)
    other.module.fill(2.0)
    engine.save(tmp_path)
    with held_back() as gate:
        writing = CheckpointWriter.from_proposals([CheckpointWriter.propose(tmp_path, "torch")], "torch")
        writing.begin(Ranks())
        with pytest.raises(BuildError, match=r"another save writes to '.*' now; give another folder"):
            other.save(tmp_path)
        engine.module.fill(0.0)
        engine.load(tmp_path)
        assert engine.module.numbers() == {1.0}
        saving = other.save(tmp_path, wait=False)
        with pytest.raises(KeyboardInterrupt), writing.cleanup_on_error(Ranks()):
            raise KeyboardInterrupt
        gate.set()
        saving.wait()
    engine.load(tmp_path)
    assert engine.module.numbers() == {2.0}


def test_another_save_while_one_is_loaded_is_told_as_that(tmp_path: Path) -> None:
    engine = engine_of()
    engine.save(tmp_path)
    found = open_checkpoint(tmp_path, "torch", Ranks())
    with pytest.raises(KeyError), read_context(found):  # an error of its own otherwise
        raise KeyError
    engine.save(tmp_path)
    with pytest.raises(BuildError, match=r"was overwritten while it was loaded; load it again"), read_context(found):
        verify(found, Ranks())


def test_what_no_folder_can_be_made_of_is_one_sentence(tmp_path: Path) -> None:
    engine = engine_of()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name in ("file/below", "nowhere"):
        with pytest.raises(BuildError, match=rf"the checkpoint '.*{name}' was not written, and what was there is as before: "):
            engine.save(tmp_path / name)


class Wide(torch.optim.SGD):
    """Keeps its momentum, and a row of it, in fp32 whatever the weights are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["row"] = torch.zeros(3)
                state["momentum"].mul_(0.9).add_(parameter.grad)
                state["row"] += state["momentum"].view(-1)[:3]
                parameter -= (0.1 * state["momentum"] + 1e-3 * state["row"].sum()).to(parameter.dtype)


def test_an_optimizers_state_comes_back_in_its_own_type(tmp_path: Path) -> None:
    losses = []
    batch = {name: value.bfloat16() for name, value in BATCH.items()}
    for start in (0, 3):
        torch.manual_seed(0)
        schedule = create_schedule(
            Counts().bfloat16(), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin])
        )
        engine = build(schedule, "torch", optimizer=lambda parameters: Wide(parameters, 0.1), loss_fn=nn.functional.mse_loss)
        if start:
            engine.load(tmp_path)
        for step in range(start, 6):
            losses.append(engine.train_batch(**batch).item())
            if step == 2:
                engine.save(tmp_path)
    assert losses[3:6] == losses[6:]
    assert {each.dtype for state in engine.optimizer.state.values() for each in state.values()} == {torch.float32}


def limits(rank: int) -> list[float]:
    """Seconds that the job's groups wait, and one for a save in the background."""
    apart = Ranks(rank, 2, mesh_of(dp=2)).in_new_group()
    assert apart.group is not None
    of_apart = apart.group._get_backend(torch.device("cpu")).options._timeout
    apart.gather(rank)  # a rank that destroys the group while another one still connects to it fails that one
    dist.destroy_process_group(apart.group)
    return [job_timeout().total_seconds(), of_apart.total_seconds()]


@pytest.mark.multiproc
def test_a_group_for_a_save_in_the_background_waits_as_long_as_the_job() -> None:
    for job, apart in run_distributed(limits, 2):
        assert job == apart != 1800  # torch's own default
