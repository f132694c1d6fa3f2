"""One schedule file on three engines: the same losses, which are those of the unmodified model in one process."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

import slapo
from slapo.training.worker import with_progress
from slapo_core import load_schedule
from slapo_testing import run_distributed
from tests.engine_models import batches, my_part, small
from tests.engines import in_one_process, scheduled
from tests.slapo_torch.layouts import adamw, mesh_of, message_of

pytestmark = pytest.mark.multiproc

TARGETS = ("torch", "deepspeed", "megatron")
TWO = ({"tp": 2}, {"pp": 2}, {"dp": 2})
FOUR = ({"pp": 2, "tp": 2}, {"pp": 2, "dp": 2})
SHORT = [("gpt2", TWO[0]), ("llama", TWO[1])]


def on_each(rank: int, name: str, layout: dict[str, int], folder: str) -> dict[str, list[float]]:
    """Five losses and an evaluation, with clipping, of each engine and of one process."""
    mesh, data = mesh_of(**layout), batches(layout.get("dp", 1))
    file, example = Path(folder, f"{rank}.json"), my_part(data[0], mesh)
    scheduled(small(name), mesh, example).save(file)
    found = {}
    for target in TARGETS:
        schedule = load_schedule(small(name), file, mesh=mesh, example_inputs=example)
        engine: Any = slapo.build(schedule, target, optimizer=adamw, microbatches=2, clip=0.1)
        found[target] = [engine.train_batch(**my_part(batch, mesh)).item() for batch in data]
        found[target].append(engine.eval_batch(**example).item())
        engine.close()
    reference: nn.Module = small(name)
    found["one process"] = [loss for loss, _ in in_one_process(reference, data, 0.1)]
    found["one process"].append(reference.eval()(**data[0]).loss.item())
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[pytest.mark.slow] * ((name, layout) not in SHORT), id=f"{name}-{layout}")
        for name in ("gpt2", "llama", "t5")
        for layout in (*TWO, *FOUR)
    ],
)
def test_they_agree(name: str, layout: dict[str, int], tmp_path: Path) -> None:
    ranks = 4 if layout in FOUR else 2
    for found in run_distributed(on_each, ranks, name, layout, str(tmp_path), timeout=110):
        expected = torch.tensor(found.pop("one process"))
        assert set(found) == set(TARGETS)
        for target, losses in found.items():
            torch.testing.assert_close(torch.tensor(losses), expected, atol=2e-5, rtol=0, msg=target)


def exchanged(rank: int, folder: str) -> dict[str, str]:
    """Return each engine's errors for checkpoints of the others, for folders that differ by rank, and for broken ones."""
    found, mesh = {}, mesh_of(dp=2)

    def engine_of(target: str) -> Any:
        torch.manual_seed(0)
        return slapo.build(slapo.create_schedule(nn.Linear(2, 2), mesh=mesh), target, optimizer=adamw)

    for target in TARGETS:
        engine = engine_of(target)
        engine.save(Path(folder, target))
        engine.save(Path(folder, f"{target} again"))
        engine.close()
    for target in TARGETS:
        engine = engine_of(target)
        for other in sorted(set(TARGETS) - {target}):
            found[f"{other} in {target}"] = message_of(lambda engine=engine, other=other: engine.load(Path(folder, other)))
            found[f"{target} over {other}"] = message_of(lambda engine=engine, other=other: engine.save(Path(folder, other)))
        own = Path(folder, target if rank else f"{target} again")
        found[f"{target} from two"] = message_of(lambda engine=engine, own=own: engine.load(own))
        found[f"{target} to two"] = message_of(lambda engine=engine: engine.save(Path(folder, f"new {rank}")))
        torn = Path(folder, f"{target} again")
        dist.barrier()
        if rank == 0:
            for file in torn.rglob("*"):
                if file.suffix in (".pt", ".distcp") and not file.name.startswith("random"):
                    file.write_bytes(file.read_bytes()[:100])
        dist.barrier()
        message = message_of(lambda engine=engine, torn=torn: engine.load(torn))
        found[f"{target} from torn"] = message[: len("BuildError")]  # each rank names its own file
        found[f"{target} from nowhere"] = message_of(lambda engine=engine: engine.load(Path(folder, "nowhere")))
        engine.close()
    return found


def test_a_checkpoint_of_another_target_or_of_other_ranks_is_refused_by_name(tmp_path: Path) -> None:
    first, second = run_distributed(exchanged, 2, str(tmp_path))
    assert first == second
    assert len(first) == 24
    for case, message in first.items():
        one, what, other = case.split(" ", 2) if case.count(" ") > 1 else (*case.split(" "), "")
        expected = {
            "in": f"is a checkpoint of target {one!r}, and this engine is of {other!r}; load it there",
            "over": f"has a checkpoint of target {other!r}, and this engine is of {one!r}; give another folder",
            "from": {"nowhere": "there is no such folder", "torn": "BuildError"}.get(
                other, "the ranks load different checkpoints"
            ),
            "to": "new 0' and ",
        }
        assert message.startswith("BuildError"), (case, message)
        assert expected[what] in message, (case, message)


@pytest.mark.parametrize("target", TARGETS)
def test_each_has_every_kind_of_class(target: str) -> None:
    for kind in ("pipeline_stage", "pipeline_engine", "runtime_engine", "log_parser"):
        assert isinstance(slapo.get_dialect_cls(kind, target), type)


def test_what_a_run_prints_is_read() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    losses = [4.0 - 0.125 * step for step in range(20)]
    assert [*with_progress(console, "reference", [5.0], 1), *with_progress(console, "training", losses, 20)] == [5.0, *losses]
    parser: Any = slapo.get_dialect_cls("log_parser", "torch")
    steps = parser.parse(console.file.getvalue().splitlines())
    assert [step.step for step in steps] == [1, *range(2, 21, 2)]
    assert [step.loss for step in steps] == pytest.approx([losses[step.step - 1] for step in steps], abs=1e-4)
    assert parser.parse(console.file.getvalue().splitlines(), run="reference") == [(1, 5.0)]
