"""The repository's distributions as wheels, and environments that hold nothing but what they declare."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

TOP = Path(__file__).parents[2]


def folders() -> dict[str, Path]:
    """The distributions of this repository: name to folder."""
    projects = [TOP / "pyproject.toml", *TOP.glob("slapo_*/pyproject.toml"), *TOP.glob("plugins/*/pyproject.toml")]
    found = {}
    for project in projects:
        name = re.search(r'^name = "(.+)"$', project.read_text(), re.MULTILINE)
        assert name, project
        found[name[1]] = project.parent
    return found


def pip(*arguments: str | Path, python: Path | None = None) -> None:
    """Run pip without any index; its output is the assertion's message."""
    target = ["--python", str(python)] if python else []
    index = ["--no-index"] if arguments[0] != "uninstall" else []
    command = [sys.executable, "-m", "pip", *target, "--disable-pip-version-check", *map(str, arguments), *index]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel of every distribution, each built from its own files alone."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheels")
    for name, folder in folders().items():
        for part in ("pyproject.toml", "README.md", "LICENSE", "src", "slapo/src"):
            if (folder / part).is_dir():
                shutil.copytree(
                    folder / part, sources / name / part, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
                )
            elif (folder / part).exists():
                (sources / name).mkdir(exist_ok=True)
                shutil.copy(folder / part, sources / name / part)
    pip("wheel", "--no-deps", "--no-build-isolation", "--find-links", out, "-w", out, *sorted(sources.iterdir()))
    return out


class Environment:
    """A virtual environment without pip that borrows the third-party packages a distribution declares.

    They are linked into it with their metadata, so pip finds them installed and resolves the rest, ours, from the wheels.
    """

    def __init__(self, folder: Path, wheels: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
        self.python = folder / "bin" / "python"
        self.site = next(folder.glob("lib/python*/site-packages"))
        self.wheels = wheels

    def lend(self, requirement: str) -> None:
        """Link an installed third-party distribution and all it requires."""
        found = distribution(Requirement(requirement).name)
        metadata = f"{found.metadata['Name']}-{found.version}"
        if (self.site / f"{metadata}.lent").exists():
            return
        (self.site / f"{metadata}.lent").touch()
        for name in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (self.site / name).exists():
                (self.site / name).symlink_to(found.locate_file(name))
        for required in requirements(found.requires or ()):
            self.lend(required)

    def install(self, name: str) -> None:
        """``pip install name``, from the wheels."""
        todo, seen = [name], set()
        while todo:
            folder = folders()[todo.pop()]
            for required in requirements(declared(folder)):
                ours = Requirement(required).name
                if ours not in folders():
                    self.lend(required)
                elif ours not in seen:
                    seen.add(ours)
                    todo.append(ours)
        pip("install", "-q", "--find-links", self.wheels, name, python=self.python)

    def run(self, *command: str) -> str:
        """Return the output of a command of this environment; ``python`` is the environment's interpreter."""
        program, *arguments = command
        result = subprocess.run(
            [str(self.python.with_name(program)), *(["-I"] if program == "python" else []), *arguments],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=self.site,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout


def declared(folder: Path) -> list[str]:
    """The dependencies in a folder's ``pyproject.toml``."""
    text = (folder / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'"(.+?)"', block[1]) if block else []


def requirements(declared: list[str] | tuple[()]) -> list[str]:
    """Those that hold here without any extra."""
    parsed = [(text, Requirement(text).marker) for text in declared]
    return [text for text, marker in parsed if marker is None or marker.evaluate({"extra": ""})]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Callable[[str], Environment]:
    """An environment with this distribution alone, which all tests that ask for it share."""

    @functools.cache
    def install(name: str) -> Environment:
        environment = Environment(tmp_path_factory.mktemp("env") / name, wheels)
        environment.install(name)
        return environment

    return install
