"""The training script in the README runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
LOSSES = README.parent / "plugins" / "slapo_training" / "README.md"


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def blocks(language: str, page: Path = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def block(words: str, page: Path = README) -> str:
    """The example that has these words."""
    (found,) = (code for code in blocks("py", page) if words in code)
    return found


def losses_of(folder: Path, script: str, ranks: int) -> list[float]:
    (folder / "train.py").write_text(script, encoding="utf-8")
    run = torchrun(folder, "--nproc-per-node", str(ranks), "train.py")
    assert run.returncode == 0, run.stderr
    return [float(line.split()[1]) for line in run.stdout.splitlines() if re.match(r"\d ", line)]


def scripts() -> list[str]:
    """The script that trains the README's own model, and the one that trains a model of Transformers."""
    return [code for code in blocks("python") if "init_process_group" in code]


def training_script() -> str:
    _, script = scripts()
    return script


def hand_written(folder: Path) -> str:
    """Write the README's own model into a folder, and return the script that trains it."""
    (model,) = (code for code in blocks("python") if "class GPT" in code)
    (folder / "gpt.py").write_text(model, encoding="utf-8")
    return scripts()[0]


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
@pytest.mark.parametrize("mesh", ["(2, 1, 2)", pytest.param("(2, 2, 2)", marks=pytest.mark.slow)])
def test_the_readmes_own_model_trains_as_the_unmodified_one(mesh: str, tmp_path: Path) -> None:
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
def test_the_readmes_training_loop_takes_the_place_of_its_first_one(tmp_path: Path) -> None:
    start, _, end = hand_written(tmp_path).partition("adamw = ")
    script = f"{start}{block('DistributedSampler(')}{end.partition('engine.close()')[2]}".replace("(2, 1, 2)", "(2, 2, 1)")
    losses = losses_of(tmp_path, script, 4)
    assert len(losses) == 2
    assert losses[-1] < losses[0]
    assert (tmp_path / "weights" / "model.safetensors").exists()


def test_ten_lines_take_the_readmes_own_model_there() -> None:
    script = scripts()[0]
    start, end = script.index("mesh = "), script.index("\n\nfor step")
    assert len(script[start:end].splitlines()) <= 10


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_readmes_script_trains_under_torchrun(tmp_path: Path) -> None:
    losses = losses_of(tmp_path, training_script(), 4)
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("mesh", ["(2, 1, 1)", "(1, 1, 2)", "(2,)"])
def test_the_readmes_script_trains_on_two_ranks(mesh: str, tmp_path: Path) -> None:
    """As the README says beside it: without the cut where there is no pipeline, without the rank where there is no axis."""
    script = training_script().replace("(2, 1, 2)", mesh)
    if mesh == "(2,)":
        script = script.replace('("pp", "dp", "tp")', '("tp",)').replace('pp_rank=mesh["pp"].get_local_rank(), ', "")
    if mesh != "(2, 1, 1)":
        script = re.sub(r"^.*cut_pipeline_stage.*$", "", script, flags=re.MULTILINE)
    losses = losses_of(tmp_path, script, 2)
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_readmes_loop_trains_the_model_of_its_script(tmp_path: Path) -> None:
    loop = block("model, _ = slapo.build(sch)")
    before, step, _ = training_script().replace("(2, 1, 2)", "(1, 1, 2)").partition("sch.tensor_parallel()")
    shown = "    if dist.get_rank() == 0:\n        print(step, loss.item())\n"
    losses = losses_of(tmp_path, f"{before}{step}\n{loop}{shown}dist.destroy_process_group()\n", 2)
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("target", ["deepspeed", "megatron"])
def test_the_readmes_engines_train_the_model_of_its_script(target: str, tmp_path: Path) -> None:
    rate, *lines = block('slapo.build(sch, "megatron"').splitlines()
    (line,) = (line for line in lines if f'"{target}"' in line)
    script = re.sub(r"^engine = .*$", f"{rate}\n{line}", training_script(), flags=re.MULTILINE)
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
def test_the_readmes_contrastive_loss_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    train = block('loss_over="replicas"', LOSSES).replace("engine.train_batch", "loss = engine.train_batch")
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
    assert "`torchrun --local-ranks-filter 0`" in README.read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(FAILING, encoding="utf-8")
    run = torchrun(tmp_path, "--local-ranks-filter", "0", "--nproc-per-node", "2", "train.py")
    *_, sentence, _empty, _rule = run.stderr.splitlines()
    assert sentence.strip().startswith("slapo_core.reporting.errors.UnknownNameError: no module 'weigth'"), run.stderr
    assert run.stderr.count("no module 'weigth'") == 1
