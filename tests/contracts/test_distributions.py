"""Every distribution installs from its wheel into an environment that has only what it declares, and works there."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import TOP, Environment, folders

CORE = {"annotate", "replace", "replace_all"}
TRACING = CORE | {"trace", "trace_until"}
PRIMITIVES = {
    "slapo-core": CORE,
    "slapo-deepspeed": TRACING,
    "slapo-example": CORE | {"freeze"},
    "slapo-fusion": TRACING | {"compile", "decompose", "fuse"},
    "slapo-kernels": TRACING | {"use_kernels"},
    "slapo-megatron": TRACING,
    "slapo-memory": TRACING | {"checkpoint", "offload"},
    "slapo-models": CORE,
    "slapo-pipeline": TRACING | {"cut_at_marks", "cut_pipeline_stage", "pipeline"},
    "slapo-plan": TRACING,
    "slapo-report": set(),
    "slapo-sharding": TRACING | {"fork_rng", "shard", "sync", "sync_batch_norm", "tensor_parallel"},
    "slapo-testing": TRACING,
    "slapo-torch": TRACING,
    "slapo-tracing": TRACING,
    "slapo-training": TRACING,
    "slapo-tune": TRACING,
    "slapo-verify": TRACING,
    "slapo-weights": TRACING,
    "slapo": TRACING
    | {"checkpoint", "compile", "decompose", "fuse"}
    | {
        "cut_at_marks",
        "cut_pipeline_stage",
        "fork_rng",
        "offload",
        "pipeline",
        "shard",
        "sync",
        "sync_batch_norm",
        "tensor_parallel",
    },
}
"""Result of ``list_primitives()`` when a distribution is installed alone."""

WITHOUT_CORE = "slapo-report"
"""It needs no other distribution, so that there is nothing to list when it is installed alone."""

SCRIPT = """
import json, {module}, slapo_core
registry = slapo_core.default_registry()
problems = [problem for record in registry.records for problem in [record.failure, *record.problems] if problem]
print(json.dumps([slapo_core.list_primitives(), sorted(slapo_core.list_primitives(name_only=False)), problems]))
"""


def test_the_table_above_has_every_distribution() -> None:
    assert set(PRIMITIVES) == set(folders())


ALWAYS = ("slapo", "slapo-core", "slapo-kernels")
"""Those that every run installs; the others are as they are."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ALWAYS)) for name in sorted({*PRIMITIVES} - {WITHOUT_CORE})],
)
def test_it_installs_alone_and_shows_exactly_its_primitives(installed: Callable[[str], Environment], name: str) -> None:
    script = SCRIPT.format(module=name.replace("-", "_"))
    listed, imported, problems = json.loads(installed(name).run("python", "-c", script))
    assert problems == []
    assert set(listed) == set(imported) == PRIMITIVES[name]


@pytest.mark.slow
def test_pages_are_made_without_core_and_torch(installed: Callable[[str], Environment]) -> None:
    script = "import slapo_report, sys; print(slapo_report.plan_page({})[:15], *{'torch', 'slapo_core'} & {*sys.modules})"
    assert installed(WITHOUT_CORE).run("python", "-c", script).strip() == "<!doctype html>"


def test_the_command_line_of_the_installed_facade(installed: Callable[[str], Environment]) -> None:
    rows = json.loads(installed("slapo").run("slapo", "plugins", "--json"))["plugins"]
    assert {name for row in rows for name in row["provides"]["primitives"]} == PRIMITIVES["slapo"]
    assert [name for row in rows for name in row["provides"]["dialects"]] == ["torch"]
    assert all(row["state"] == "loaded" for row in rows)


@pytest.mark.parametrize("name", sorted(PRIMITIVES))
def test_its_wheel_is_typed_and_holds_one_module(wheels: Path, name: str) -> None:
    module = name.replace("-", "_")
    (wheel,) = wheels.glob(f"{module}-*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert f"{module}/py.typed" in files
    assert {file.split("/")[0] for file in files if ".dist-info" not in file} == {module}


def test_versions_move_in_lockstep() -> None:
    texts = {name: (folder / "pyproject.toml").read_text() for name, folder in folders().items()}
    versions = {name: re.search(r'^version = "(.+)"$', text, re.MULTILINE)[1] for name, text in texts.items()}
    assert len(set(versions.values())) == 1
    (version,) = set(versions.values())
    pins = {pin for text in texts.values() for pin in re.findall(r'"(slapo-[a-z]+.*?)"', text)}
    assert all(pin.endswith(f"~={version}") for pin in pins if "slapo-" in pin and "=" in pin)


def test_the_development_setup_installs_every_folder() -> None:
    installed = re.findall(r"^-e (.+)$", (TOP / "requirements-dev.txt").read_text(), re.MULTILINE)
    assert {(TOP / folder).resolve() for folder in installed} == {folder.resolve() for folder in folders().values()}


CORE_ALONE = """
import torch, slapo_core
from torch import nn
sch = slapo_core.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
sch["1"].replace(nn.ReLU())
sch["0"].annotate("weight", "kept", True)
module, _ = slapo_core.build(sch)
module(torch.ones(2, 4)).sum().backward()
problems = []
calls = (
    lambda s: s.trace(),
    lambda s: s.find("0"),
    lambda s: s.replace(nn.ReLU(), [("", "relu")]),
    lambda s: s["0"].shard("weight", 0),
)
for needs_more in calls:
    try:
        needs_more(slapo_core.create_schedule(nn.Sequential(nn.Linear(4, 4))))
    except (slapo_core.SlapoError, AttributeError) as error:
        problems.append(str(error))
print("\\n".join(problems))
"""


def test_core_alone_replaces_and_names_the_package_that_does_the_rest(installed: Callable[[str], Environment]) -> None:
    lines = installed("slapo-core").run("python", "-c", CORE_ALONE).splitlines()
    assert [line.rpartition("pip install ")[2] for line in lines] == ["slapo-tracing"] * 3 + ["slapo-sharding"]


TRAINS = """
import torch, slapo_core
from torch import nn
torch.manual_seed(0)
sch = slapo_core.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)))
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
engine = slapo_core.build(sch, target="deepspeed", optimizer=sgd, loss_fn=nn.functional.mse_loss)
x, y = torch.randn(8, 4), torch.randn(8, 4)
print(*(engine.train_batch(x, labels=y).item() for _ in range(3)))
"""


@pytest.mark.needs("deepspeed")
def test_core_and_an_engine_alone_train(installed: Callable[[str], Environment]) -> None:
    printed = installed("slapo-deepspeed").run("python", "-c", TRAINS).splitlines()[-1]
    losses = [float(text) for text in printed.split()]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
