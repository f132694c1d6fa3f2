"""Who may import whom."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

from .conftest import TOP, declared, folders
from .import_graph import Sources

HEAVY = ["deepspeed", "flash_attn", "liger_kernel", "megatron", "rich", "transformers", "triton", "typer"]


def test_import_linter_contracts() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=TOP)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_distribution_is_under_the_contracts() -> None:
    (packages,) = re.findall(r"^root_packages = \[(.*?)\]", (TOP / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert set(re.findall(r'"(.+?)"', packages)) == {name.replace("-", "_") for name in folders()}


def test_a_distribution_declares_what_it_imports() -> None:
    owners = {name.replace("-", "_"): name for name in folders()}
    needs = {name: {name, *(Requirement(line).name for line in declared(folder))} for name, folder in folders().items()}
    imports = [each for each in Sources().imports if not each.for_types]
    pairs = {(owners[each.source.partition(".")[0]], owners[each.module.partition(".")[0]]) for each in imports}
    optional = {("slapo", "slapo-kernels"), ("slapo-testing", "slapo-kernels"), ("slapo-testing", "slapo-sharding")}
    assert {(source, target) for source, target in pairs if target not in needs[source]} == optional


ASKS = """
import importlib, sys
import slapo_core, torch

for module in ("slapo_core", "slapo_testing", "slapo"):
    importlib.import_module(module)
    slapo_core.list_primitives()
    print(*sys.modules)

import slapo
from slapo.cli.app import create_app
from typer.testing import CliRunner

slapo.list_primitives(name_only=False)
sch = slapo_core.create_schedule(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
sch["0"].checkpoint()
targets = slapo_core.Registry().load_all("dialect")
assert "deepspeed" in targets
for target, dialect in targets.items():
    for kind in dialect.classes:
        assert isinstance(slapo.get_dialect_cls(kind, target), type)
listed = CliRunner().invoke(create_app(), ["dialects"])
assert listed.exit_code == 0 and all(target in listed.output for target in targets), listed.output
print(*sys.modules)
"""


def test_importing_pulls_in_nothing_heavy_and_no_engine_is_imported_before_it_is_built_for() -> None:
    result = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    core, *others, loaded = (set(line.split()) for line in result.stdout.splitlines())
    assert "slapo_testing" not in core
    registrars = r"slapo(_core|_training|_tune)?\.|.*\.(plugin|hookspecs|build_hooks)$"
    assert [name for name in core if re.match(r"slapo\w*\.", name) and not re.match(registrars, name)] == []
    for each in (core, *others):
        assert each.isdisjoint(HEAVY)
    assert "slapo_deepspeed.engine" in loaded
    assert loaded.isdisjoint({"deepspeed", "megatron"})


def test_something_heavy_would_be_seen() -> None:
    """The test above could not fail if a module that is imported were not seen."""
    result = subprocess.run(
        [sys.executable, "-c", "import sys, transformers; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "transformers" in result.stdout.split()
