"""Checkpoints of the dialect: exactly on the same layout, and on others."""

from __future__ import annotations

import re
from functools import partial
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slapo_core import build, create_schedule
from slapo_megatron.optimizer.local_tensors import LocalTensors
from slapo_megatron.process_state.cpu_mode import cpu_mode
from slapo_testing import run_distributed
from slapo_training.engines import without_warnings
from slapo_training.model import boxes
from tests.engine_models import batches, my_part, small
from tests.engines import PLUGINS, check_own_buffers, own_buffers, scheduled
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

pytestmark = pytest.mark.multiproc


def engine_of(layout: dict[str, int], chunks: int = 1, name: str = "gpt2", **options: Any) -> tuple[Any, Any]:
    """An engine on a mesh, and the mesh."""
    mesh = mesh_of(**layout)
    schedule = scheduled(small(name), mesh, my_part(batches(2)[0], mesh), chunks)
    return build(schedule, "megatron", **{"optimizer": adamw, "microbatches": 2, **options}), mesh


def resumed(rank: int, layout: dict[str, int], chunks: int, options: dict[str, Any], folder: str) -> tuple[Any, Any]:
    """Losses of the last two of four steps, and those of an engine that was loaded before them."""
    data = batches(2)
    engine, mesh = engine_of(layout, chunks, **options)
    for batch in data[:2]:
        engine.train_batch(**my_part(batch, mesh))
    engine.save(folder)
    expected = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data[2:4]]
    engine.close()
    engine, _ = engine_of(layout, chunks, **options)
    engine.load(folder)
    found = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data[2:4]]
    engine.close()
    return found, expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "chunks", "options"),
    [
        ({"dp": 2}, 1, {"distributed_optimizer": True, "precision": "bf16"}),
        pytest.param({"tp": 2}, 1, {"distributed_optimizer": True}, marks=pytest.mark.slow),
        ({"pp": 2}, 2, {"precision": "bf16"}),
        ({"pp": 2}, 1, {"distributed_optimizer": True}),
    ],
    ids=str,
)
def test_saving_and_going_on(layout: dict[str, int], chunks: int, options: dict[str, Any], tmp_path: Path) -> None:
    for found, expected in run_distributed(resumed, 2, layout, chunks, options, str(tmp_path)):
        assert found == expected


def elsewhere(rank: int, layout: dict[str, int], chunks: int, options: dict[str, Any], folder: str, saves: bool) -> list[float]:
    """Losses of two more steps, behind two steps and a save, or behind a load."""
    engine, mesh = engine_of(layout, chunks, **options)
    data = batches(2)
    if saves:
        for batch in data[:2]:
            engine.train_batch(**my_part(batch, mesh))
        engine.save(folder)
    else:
        engine.load(folder)
    losses = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data[2:4]]
    engine.close()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("shared", [pytest.param(False, marks=pytest.mark.slow), True])
def test_any_other_layout_goes_on(shared: bool, tmp_path: Path) -> None:
    options = {"distributed_optimizer": shared, "lr_scheduler": None}
    expected = run_distributed(elsewhere, 2, {"dp": 2}, 1, options, str(tmp_path), True)[0]
    options["distributed_optimizer"] = True  # also where it was not saved with it
    for layout, chunks in (({"dp": 1}, 1), ({"tp": 2}, 1), ({"pp": 2}, 1), ({"pp": 2}, 2)):
        ranks = 2 if layout != {"dp": 1} else 1
        found = run_distributed(elsewhere, ranks, layout, chunks, options, str(tmp_path), False)[0]
        assert found == pytest.approx(expected, abs=2e-5), layout


LAYOUTS: list[dict[str, int]] = [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shared", [False, True])
def test_all_pairs_of_layouts_go_on(shared: bool, tmp_path: Path) -> None:
    options = {"distributed_optimizer": shared}
    for number, before in enumerate([*LAYOUTS, {"tp": 2, "dp": 2}]):
        folder = str(tmp_path / str(number))
        expected = run_distributed(elsewhere, prod(before.values()), before, 1, options, folder, True)[0]
        for layout in LAYOUTS:
            found = run_distributed(elsewhere, prod(layout.values()), layout, 1, options, folder, False)[0]
            assert found == pytest.approx(expected, abs=2e-5), (before, layout)


def falling(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def plain(parameters: Any) -> torch.optim.Optimizer:
    """It keeps no state."""
    return torch.optim.SGD(parameters, lr=0.1)


def grouped(parameters: Any) -> torch.optim.Optimizer:
    held = [*parameters]
    groups = [
        {"params": [p for p in held if p.dim() > 1], "lr": 2e-2},
        {"params": [p for p in held if p.dim() < 2], "lr": 1e-3},
    ]
    return torch.optim.AdamW(groups, eps=1e-3)


class Padded(nn.Module):
    """Its tie and its odd sizes make several buckets with padding between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)).relu()) * self.scale


def padded(rank: int, layout: dict[str, int], folder: str) -> list[tuple[list[float], list[float]]]:
    """Losses behind a load into another engine and into the same one, and those that went before."""
    mesh, x = mesh_of(**layout), torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0))

    def made() -> Any:
        torch.manual_seed(0)
        schedule = create_schedule(Padded(), mesh=mesh, example_inputs={"x": x[0, :2]}, plugins=PLUGINS)
        if layout.get("pp", 1) > 1:
            schedule["middle"].cut_pipeline_stage()
        config = {} if layout.get("pp", 1) > 1 else {"ddp": {"overlap_grad_reduce": True, "bucket_size": 20}}
        options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "distributed_optimizer": True, "config": config}
        return build(schedule, "megatron", optimizer=partial(adamw_of, amsgrad=True), microbatches=2, **options)

    def trained(engine: Any, which: range) -> list[float]:
        return [engine.train_batch(x=x[index], labels=x[index]).item() for index in which]

    engine = made()
    trained(engine, range(3))
    engine.save(folder)
    expected = trained(engine, range(3, 6))
    engine.load(folder)
    again = trained(engine, range(3, 6))
    engine.close()
    engine = made()
    engine.load(folder)
    other = trained(engine, range(3, 6))
    engine.close()
    return [(again, expected), (other, expected)]


def adamw_of(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}], ids=str)
def test_padding_between_buckets_is_none_of_the_weights(layout: dict[str, int], tmp_path: Path) -> None:
    for runs in run_distributed(padded, 2, layout, str(tmp_path)):
        for found, expected in runs:
            assert found == expected


@pytest.mark.parametrize("shape", [(6,), (4, 3), (2, 3, 4), (1, 5), (3, 1, 2, 2)], ids=str)
def test_following_elements_are_boxes_in_the_same_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    for start, stop in combinations(range(whole.numel() + 1), 2):
        found = [(offset, sizes) for offset, sizes in boxes(shape, start, stop)]
        assert len(found) <= 2 * len(shape) - 1
        parts = [whole[tuple(map(slice, offset, map(sum, zip(offset, sizes, strict=True))))] for offset, sizes in found]
        assert [part.shape for part in parts] == [sizes for _, sizes in found]
        assert torch.equal(torch.cat([part.flatten() for part in parts]), torch.arange(start, stop))


def read_by_megatron(rank: int, folder: str) -> list[bool]:
    """Equality of the weights, and of the optimizer's state of both replicas, with those that Megatron's own reader returns."""
    from megatron.core import dist_checkpointing

    engine, mesh = engine_of({"dp": 2}, distributed_optimizer=True)
    engine.train_batch(**my_part(batches(2)[0], mesh))
    engine.save(folder)
    (data,) = Path(folder).glob("data-*")
    with cpu_mode(), without_warnings():
        found = dist_checkpointing.load_plain_tensors(str(data))
        kept = engine.optimizer_state(LocalTensors(engine.program))._whole("exp_avg")
    equal = [torch.equal(found[name], parameter) for name, parameter in engine.module.named_parameters()]
    equal += [torch.equal(found[f"optimizer.exp_avg.{name}"], value) for name, value in kept.items()]
    engine.close()
    return equal


@pytest.mark.slow
def test_megatrons_own_reader_reads_the_tensors(tmp_path: Path) -> None:
    for equal in run_distributed(read_by_megatron, 2, str(tmp_path)):
        assert len(equal) > 50
        assert all(equal)


def before_any_step(rank: int, folder: str) -> tuple[list[float], list[float]]:
    """Losses of an engine that was saved before its first step, and of one that had stepped and loaded that."""
    data = batches(2)
    engine, mesh = engine_of({"dp": 2}, lr_scheduler=falling, distributed_optimizer=True, precision="bf16")
    engine.save(folder)
    expected = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data[:2]]
    engine.load(folder)
    found = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data[:2]]
    engine.close()
    return found, expected


def test_what_was_saved_before_the_first_step_begins_anew(tmp_path: Path) -> None:
    for found, expected in run_distributed(before_any_step, 2, str(tmp_path)):
        assert found == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(plain, {"precision": "bf16"}), (grouped, {"distributed_optimizer": True})],
    ids=["no state", "groups"],
)
def test_rates_groups_and_masters_go_on(optimizer: Any, options: dict[str, Any], tmp_path: Path) -> None:
    options = {"optimizer": optimizer, "lr_scheduler": falling, **options}
    for found, expected in run_distributed(resumed, 2, {"dp": 2}, 1, options, str(tmp_path)):
        assert found == expected


def per_stage(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2 * (1 + dist.get_rank()))


def unsavable(rank: int, folder: str) -> list[str]:
    """Messages of saving an optimizer whose groups differ by stage, and one whose state has other shapes, then of training."""
    messages = []
    for layout, optimizer in (({"pp": 2}, per_stage), ({"dp": 2}, torch.optim.Adafactor)):
        engine, mesh = engine_of(layout, optimizer=optimizer)
        engine.train_batch(**my_part(batches(2)[0], mesh))
        messages.append(message_of(lambda engine=engine: engine.save(folder)))
        engine.close()
        messages.append(message_of(lambda engine=engine, mesh=mesh: engine.train_batch(**my_part(batches(2)[0], mesh))))
    return messages


def test_what_a_checkpoint_of_megatrons_cannot_hold_is_refused_before_it_is_begun(tmp_path: Path) -> None:
    first, second = run_distributed(unsavable, 2, str(tmp_path / "none"))
    assert first == second
    assert "what Megatron's checkpoint has once for all ranks," in first[0]
    assert "Adafactor keeps" in first[2]
    assert "in another shape than its parameter's, which cannot be written here" in first[2]
    assert first[1] == first[3] == "BuildError: this engine is closed; build another one"
    assert not (tmp_path / "none").exists()


def refused(rank: int, folder: str) -> list[str]:
    engine, _ = engine_of({"dp": 2})
    messages = [message_of(lambda: engine.load(folder))]
    engine.save(folder)
    engine.close()
    for options in ({"optimizer": plain}, {"name": "llama"}, {"precision": "bf16"}):
        engine, _ = engine_of({"dp": 2}, **options)
        messages.append(message_of(lambda engine=engine: engine.load(folder)))
        engine.close()
    return messages


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    first, second = run_distributed(refused, 2, str(tmp_path))
    assert first == second
    assert "is not a complete checkpoint of target 'megatron': it has no slapo.json" in first[0]
    assert "saved with 'AdamW' for the optimizer, but this engine has 'SGD'; build with the same" in first[1]
    assert "is in the model, not the checkpoint; load it into the same model" in first[2]
    assert "saved with 'fp32' for precision, but this engine has 'bf16'" in first[3]


def damaged(rank: int, folder: str) -> list[Any]:
    """Messages of a failed save, of loading a damaged file and of training afterwards, and the position of training."""
    engine, mesh = engine_of({"dp": 2})
    engine.train_batch(**my_part(batches(2)[0], mesh))
    engine.save(folder, extra={"next": 1})
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    engine.train_batch(**my_part(batches(2)[1], mesh))
    kept, torch.save = torch.save, _fail if rank == 1 else torch.save
    messages = [message_of(lambda: engine.save(folder, extra={"next": 2}))]
    torch.save = kept
    found = engine.load(folder), engine.steps, all(map(torch.equal, before, engine.module.parameters()))
    engine.train_batch(**my_part(batches(2)[1], mesh))
    dist.barrier()
    if rank == 0:
        file = max(Path(folder).rglob("*.distcp"), key=lambda file: file.stat().st_size)
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)
    dist.barrier()
    messages.append(message_of(lambda: engine.load(folder)))
    messages.append(message_of(lambda: engine.train_batch(**my_part(batches(2)[2], mesh))))
    engine.close()
    return [messages, found, engine.steps]


def _fail(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_damaged_checkpoint_changes_nothing_and_a_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    for (full, broken, after), found, steps in run_distributed(damaged, 2, str(tmp_path)):
        assert "No space left on device" in full
        assert found == ({"next": 1}, 1, True)
        assert broken.startswith("BuildError: the checkpoint ")
        assert "has other bytes than were written; load another one" in broken
        assert after == "no error"
        assert steps == 3


def turned(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(grouped(parameters).param_groups[::-1], eps=1e-3)


def in_other_groups(rank: int, folder: str, options: dict[str, Any]) -> list[str]:
    """Messages of loading with the groups in the same order and in another; a refusal leaves the engine unchanged."""
    messages, data = [], batches(2)
    for optimizer in (grouped, turned, grouped):
        engine, mesh = engine_of({"dp": 2}, optimizer=optimizer, **options)
        if not messages:
            engine.train_batch(**my_part(data[0], mesh))
            engine.save(folder)
        before = engine.eval_batch(**my_part(data[1], mesh)).item()
        messages.append(message_of(lambda engine=engine: engine.load(folder)))
        assert messages[-1] == "no error" or engine.eval_batch(**my_part(data[1], mesh)).item() == before
        engine.close()
    return messages


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"distributed_optimizer": True}], ids=["each", "shared"])
def test_groups_in_another_order_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    first, second = run_distributed(in_other_groups, 2, str(tmp_path), options)
    assert first == second
    assert first[::2] == ["no error"] * 2
    assert re.search(r"'.*' was saved in group \d of the optimizer, and is in group \d; build with the same groups", first[1])


class Counting(nn.Linear):
    """Linear with an extra state that is not a tensor."""

    def get_extra_state(self) -> Any:
        return {"count": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"count": 3}


def counting(rank: int, folder: str) -> str:
    schedule = create_schedule(nn.Sequential(Counting(4, 4)), mesh=mesh_of(), plugins=PLUGINS)
    engine: Any = build(schedule, "megatron", optimizer=plain, loss_fn=nn.functional.mse_loss)
    message = message_of(lambda: engine.save(folder))
    engine.close()
    return message


def test_what_modules_keep_beside_tensors_is_refused(tmp_path: Path) -> None:
    assert "'0' has extra state (get_extra_state)" in run_distributed(counting, 1, str(tmp_path / "none"))[0]
    assert not (tmp_path / "none").exists()


def test_every_replica_gets_its_own_buffers_back(tmp_path: Path) -> None:
    check_own_buffers(*run_distributed(own_buffers, 2, "megatron", str(tmp_path), {"distributed_optimizer": True}))


def in_two_groups(parameters: Any, **odd: Any) -> torch.optim.Optimizer:
    """The second group has other options."""
    held = list(parameters)
    return torch.optim.AdamW([{"params": held[::2]}, {"params": held[1::2], **odd}], lr=1e-2, eps=1e-3)


def kept_otherwise(rank: int, folder: str) -> list[Any]:
    """Messages of loads whose optimizer has more or fewer states than saved, and of a save with states for some parameters.

    Also the losses after each refusal, and those of an engine that never loaded.
    """
    messages, losses, data = [], [], batches(2)
    for saves, loads in ((False, True), (True, False)):
        path = f"{folder}/{saves}"
        engine, mesh = engine_of({"dp": 2}, optimizer=partial(adamw_of, amsgrad=saves))
        engine.train_batch(**my_part(data[0], mesh))
        engine.save(path)
        engine.close()
        for asks in (True, False):
            engine, mesh = engine_of({"dp": 2}, optimizer=partial(adamw_of, amsgrad=loads))
            messages += [message_of(lambda engine=engine, path=path: engine.load(path))] if asks else []
            losses.append([engine.train_batch(**my_part(batch, mesh)).item() for batch in data])
            engine.close()
    engine, mesh = engine_of({"dp": 2}, optimizer=partial(in_two_groups, amsgrad=True))
    engine.train_batch(**my_part(data[0], mesh))
    messages.append(message_of(lambda: engine.save(f"{folder}/none")))
    engine.close()
    return [messages, losses]


def test_what_an_optimizer_keeps_has_to_be_what_was_saved(tmp_path: Path) -> None:
    for (more, fewer, some), losses in run_distributed(kept_otherwise, 2, str(tmp_path)):
        assert "saved with exp_avg, exp_avg_sq, step in the optimizer's state, but this engine's has exp_avg, " in more
        assert "but this engine's has exp_avg, exp_avg_sq, step; build with the same options of the optimizer" in fewer
        assert "AdamW keeps 'max_exp_avg_sq' for some parameters and not for others" in some
        assert losses[::2] == losses[1::2]
    assert not (tmp_path / "none").exists()


def weights_alone(rank: int, folder: str) -> list[float]:
    """The loss of an engine that has trained, and of one that only evaluates and loads what that saved."""
    found = []
    for optimizer in (adamw, None):
        engine, mesh = engine_of({"dp": 2}, optimizer=optimizer)
        if optimizer is not None:
            engine.train_batch(**my_part(batches(2)[0], mesh))
            engine.save(folder)
        else:
            engine.load(folder)
        found.append(engine.eval_batch(**my_part(batches(2)[1], mesh)).item())
        engine.close()
        assert "this engine is closed" in message_of(lambda engine=engine: engine.load(folder))
    return found


def test_an_engine_that_only_evaluates_takes_the_weights(tmp_path: Path) -> None:
    for trained, evaluated in run_distributed(weights_alone, 2, str(tmp_path)):
        assert trained == evaluated


class Beside(nn.Linear):
    """Has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.none = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.none.sum()


def without_elements(rank: int, folder: str) -> list[float]:
    """The loss behind a save, and of another engine that loads it."""
    found = []
    for loads in (False, True):
        torch.manual_seed(loads)
        schedule = create_schedule(nn.Sequential(Beside()), mesh=mesh_of(), plugins=PLUGINS)
        engine: Any = build(schedule, "megatron", optimizer=adamw, loss_fn=nn.functional.mse_loss)
        x = torch.linspace(-1, 1, 16).view(4, 4)
        if loads:
            engine.load(folder)
        else:
            engine.train_batch(input=x, labels=x)
            engine.save(folder)
        found.append([engine.train_batch(input=x, labels=x).item() for _ in range(2)])
        engine.close()
    return found


def test_a_parameter_without_elements_needs_no_place(tmp_path: Path) -> None:
    ((expected, found),) = run_distributed(without_elements, 1, str(tmp_path))
    assert found == expected
