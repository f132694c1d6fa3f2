"""Everything that users can call is documented, and the commands in README.md exist."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys

import pytest
import typer
from packaging.requirements import Requirement
from typer.testing import CliRunner

from slapo.cli.app import create_app
from slapo_core import Dialect, Registry, call_signature
from tools.house import docstrings, opens_badly

from .conftest import TOP, declared, folders

REGISTRY = Registry()
COMMANDS = [
    line.partition("  #")[0].strip()
    for page in ("README.md", "CONTRIBUTING.md")
    for block in re.findall(r"```sh\n(.*?)```", (TOP / page).read_text(), re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.parametrize("name", REGISTRY.names("primitive"))
def test_every_primitive_is_documented(name: str) -> None:
    primitive = REGISTRY.primitive(name)
    own = primitive.__dict__.get("__doc__")
    assert own, f"{primitive.__name__} has no docstring"
    documented = inspect.cleandoc(own)
    taken = list(call_signature(primitive).parameters.values())[1:]
    missing = [p.name for p in taken if not re.search(rf"^\s*\*{{0,2}}{p.name}\b.*:", documented, re.MULTILINE)]
    assert not missing, f"{primitive.__name__} does not say what {missing} are"


@pytest.mark.parametrize("name", REGISTRY.names("dialect"))
def test_every_dialect_is_documented_and_says_what_it_can_do(name: str) -> None:
    dialect: type[Dialect] = REGISTRY.get("dialect", name)
    assert inspect.getdoc(dialect)
    assert dialect.capabilities


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_every_command_in_the_readme_exists(command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (TOP / "Makefile").read_text(), re.MULTILINE)
    elif program == "slapo":
        app: typer.Typer = create_app()
        result = CliRunner().invoke(app, [arguments[0], "--help"])
        assert result.exit_code == 0, result.output
        options = [argument for argument in arguments if argument.startswith("--")]
        assert [option for option in options if option not in result.output] == []
    else:
        assert (TOP / program).stat().st_mode & 0o111


def test_the_readmes_show_something() -> None:
    assert {"make demo", "make test", "slapo plugins"} <= set(COMMANDS)


@pytest.mark.parametrize("name", sorted(folders()))
def test_every_distribution_has_a_page(name: str) -> None:
    text = (folders()[name] / "README.md").read_text()
    assert text.startswith("# ")
    assert len(text.split()) > 40, "say what it gives, with an example"


@pytest.mark.parametrize("name", sorted(set(folders()) - {"slapo"}))
def test_the_install_command_on_its_page_names_all_of_ours_that_it_needs(name: str) -> None:
    found, needed, todo = folders(), set[str](), [name]
    while todo:
        needed.add(each := todo.pop())
        own = {Requirement(line).name for line in declared(found[each])}
        todo += sorted((own & set(found)) - needed)
    commands = re.findall(r"^pip install (.*)$", (found[name] / "README.md").read_text(), re.MULTILINE)
    wanted = {f"./{found[each].relative_to(TOP).as_posix()}" for each in needed}
    assert all(wanted == {word for word in command.split() if word.startswith("./")} for command in commands)


def test_the_command_line_says_one_sentence_for_an_unknown_primitive() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from slapo.cli.app import main; main()", "no-such-command"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler asks, of inputs that are not leaves
@pytest.mark.parametrize("name", sorted(set(folders()) - {"slapo"}))
def test_the_example_on_its_page_runs(name: str) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (folders()[name] / "README.md").read_text(), re.DOTALL)
    exec(source, {"__name__": name})  # noqa: S102  the page is ours


SOURCE_FOLDERS = sorted(
    path.name for path in TOP.iterdir() if path.is_dir() and path.name not in ("build", "dist") and path.name[0] != "."
)


@pytest.mark.parametrize("folder", SOURCE_FOLDERS)
def test_no_docstring_opens_with_a_riddle(folder: str) -> None:
    files = [file for file in (TOP / folder).rglob("*.py") if "build" not in file.parts]
    riddles = [f"{file.relative_to(TOP)}:{line}" for file in files for line, text in docstrings(file) if opens_badly(text)]
    assert riddles == []
