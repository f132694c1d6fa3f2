"""The training scripts in the README and in the guide to own models train as the unmodified models do."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from slapo_testing import run_distributed

from . import page_runner

README = Path(__file__).parents[2] / "README.md"
GUIDE = README.parent / "docs" / "guides" / "own_model.md"


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def blocks() -> list[str]:
    """The Python of the README."""
    return [block.source for block in page_runner.blocks(README) if block.language == "python"]


def of_guide(name: str) -> str:
    """The file of this name that the guide shows."""
    (found,) = (block.content for block in page_runner.blocks(GUIDE) if block.file == name)
    return found


def losses_of(folder: Path, script: str, ranks: int) -> list[float]:
    (folder / "train.py").write_text(script, encoding="utf-8")
    run = torchrun(folder, "--nproc-per-node", str(ranks), "train.py")
    assert run.returncode == 0, run.stderr
    return printed_losses(run.stdout)


def printed_losses(output: str) -> list[float]:
    return [float(line.split()[1]) for line in output.splitlines() if re.match(r"\d ", line)]


def output_of(rank: int) -> str:
    """Run ``train.py`` in the process group of this worker, which outlives the script, and return its output."""
    group = patch.multiple(dist, init_process_group=lambda backend: None, destroy_process_group=lambda: None)
    with group, redirect_stdout(StringIO()) as output:
        runpy.run_path("train.py", run_name="__main__")
    sys.modules.pop("gpt", None)
    return output.getvalue()


def losses_of_workers(folder: Path, script: str, ranks: int) -> list[float]:
    """As ``losses_of``, in processes that have imported torch already."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(folder)
        monkeypatch.chdir(folder)
        return printed_losses("".join(run_distributed(output_of, ranks, timeout=100)))


def script() -> str:
    """The script that trains the README's own model."""
    (found,) = (code for code in blocks() if "init_process_group" in code)
    return found


def hand_written(folder: Path) -> str:
    """Write the README's own model into a folder, and return the script that trains it."""
    (model,) = (code for code in blocks() if "class GPT" in code)
    (folder / "gpt.py").write_text(model, encoding="utf-8")
    return script()


UNMODIFIED = """
from functools import partial

import torch
from gpt import GPT

{inputs}
model = GPT()
{adamw}
optimizer = adamw(model.parameters())
for step in range(5):
    loss = model(ids, targets)[1]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, f"{{loss.item():.4f}}")
"""


def line_with(start: str, script: str) -> str:
    (line,) = (line for line in script.splitlines() if line.startswith(start))
    return line


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("mesh", "losses_of"),
    [
        ("(2, 1, 2)", losses_of_workers),
        *(pytest.param(mesh, losses_of, marks=pytest.mark.slow) for mesh in ("(2, 1, 2)", "(2, 2, 2)")),
    ],
)
def test_the_readmes_own_model_trains_as_the_unmodified_one(
    mesh: str, losses_of: Callable[[Path, str, int], list[float]], tmp_path: Path
) -> None:
    script = hand_written(tmp_path)
    seed, inputs, adamw = (line_with(start, script) for start in ("torch.manual_seed", "ids, targets", "adamw = "))
    expected = losses_of(tmp_path, UNMODIFIED.format(inputs=f"{seed}\n{inputs}", adamw=adamw), 1)
    stages, replicas, parts = map(int, mesh.strip("()").split(","))
    script = script.replace("(2, 1, 2)", mesh)
    if replicas > 1:
        share = f'ids, targets = (each.chunk({replicas})[mesh["dp"].get_local_rank()] for each in (ids, targets))\n'
        script = script.replace("for step in range", f"{share}for step in range").replace("microbatches=4", "microbatches=2")
    losses = losses_of(tmp_path, script, stages * replicas * parts)
    assert losses == pytest.approx(expected, abs=2e-4)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_guides_training_loop_trains_and_exports(tmp_path: Path) -> None:
    losses = losses_of(tmp_path, of_guide("train.py"), 2)
    assert len(losses) == 2
    assert losses[-1] < losses[0]
    assert (tmp_path / "weights" / "model.safetensors").exists()


def test_ten_lines_take_the_readmes_own_model_there() -> None:
    start, end = script().index("mesh = "), script().index("\n\nfor step")
    assert len(script()[start:end].splitlines()) <= 10


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_guides_script_trains_a_model_of_transformers(tmp_path: Path) -> None:
    losses = losses_of(tmp_path, of_guide("llm.py"), 4)
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("mesh", ["(2, 1, 1)", "(1, 1, 2)", "(2,)"])
def test_the_guides_script_trains_on_two_ranks(mesh: str, tmp_path: Path) -> None:
    """As the guide says beside it: without the cut where there is no pipeline, without the rank where there is no axis."""
    script = of_guide("llm.py").replace("(2, 1, 2)", mesh)
    if mesh == "(2,)":
        script = script.replace('("pp", "dp", "tp")', '("tp",)').replace('pp_rank=mesh["pp"].get_local_rank(), ', "")
    if mesh != "(2, 1, 1)":
        script = re.sub(r"^.*cut_pipeline_stage.*$", "", script, flags=re.MULTILINE)
    losses = losses_of(tmp_path, script, 2)
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_guides_own_loop_trains(tmp_path: Path) -> None:
    losses = losses_of(tmp_path, of_guide("loop.py"), 2)
    assert len(losses) == 5
    assert losses[-1] < losses[0]


ENGINES = {
    "deepspeed": 'config={"zero_optimization": {"stage": 1}}',
    "megatron": 'precision="bf16", distributed_optimizer=True',
}


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("target", sorted(ENGINES))
def test_other_engines_train_the_model_of_the_guides_script(target: str, tmp_path: Path) -> None:
    adamw = "partial(torch.optim.AdamW, lr=1e-3)"
    line = f"engine = slapo.build(sch, '{target}', optimizer={adamw}, microbatches=8, {ENGINES[target]})"
    script = re.sub(r"^engine = .*$", line, of_guide("llm.py"), flags=re.MULTILINE)
    losses = losses_of(tmp_path, script, 4)
    assert len(losses) == 5
    assert losses[-1] < losses[0]


TOWERS = """
from functools import partial
import torch, slapo
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.distributed.device_mesh import init_device_mesh

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text, self.scale = nn.Linear(12, 8), nn.Linear(6, 8), nn.Parameter(torch.ones(1))

    def forward(self, image, text):
        return {"image": F.normalize(self.image(image)), "text": F.normalize(self.text(text)), "scale": self.scale.exp()}

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
torch.manual_seed(0)
sch, adamw = slapo.create_schedule(Towers(), mesh=mesh), partial(torch.optim.AdamW, lr=1e-2)
images, texts = torch.randn(64, 12), torch.randn(64, 6)
model, whole = Towers(), {"image": images, "text": texts}
model.load_state_dict(sch.mod.state_dict())
images, texts = (each.chunk(2)[dist.get_rank()] for each in (images, texts))
"""


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_guides_contrastive_loss_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    (shown,) = (each.source for each in page_runner.blocks(GUIDE) if "def contrast(" in each.source)
    contrast = re.search(r"^def contrast\(.*?\n\n", shown, re.MULTILINE | re.DOTALL)
    assert contrast
    options = 'loss_fn=contrast, loss_over="replicas", microbatches=16, optimizer=adamw'
    assert options.replace("adamw", "sgd") in shown
    build = f'engine = slapo.build(sch, target="torch", {options})\nloss = engine.train_batch(image=images, text=texts)\n'
    train = contrast[0] + build
    compared = "if dist.get_rank() == 0:\n    print(0, loss.item())\n    print(1, contrast(model(**whole), None).item())\n"
    ours, expected = losses_of(tmp_path, f"{TOWERS}{train}{compared}dist.destroy_process_group()\n", 2)
    assert ours == pytest.approx(expected, abs=1e-5)


FAILING = """
import os
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
import slapo

@record
def main():
    sch = slapo.create_schedule(nn.Linear(4, 4))
    if os.environ["RANK"] == "1":
        sch["weigth"]

main()
"""


@pytest.mark.slow
@pytest.mark.multiproc
def test_an_error_is_the_last_that_torchrun_says(tmp_path: Path) -> None:
    assert "`torchrun --local-ranks-filter 0`" in GUIDE.read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(FAILING, encoding="utf-8")
    run = torchrun(tmp_path, "--local-ranks-filter", "0", "--nproc-per-node", "2", "train.py")
    *_, sentence, _empty, _rule = run.stderr.splitlines()
    assert sentence.strip().startswith("slapo_core.reporting.errors.UnknownNameError: no module 'weigth'"), run.stderr
    assert run.stderr.count("no module 'weigth'") == 1
