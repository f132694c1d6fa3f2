"""Run the code blocks of one page of ``docs/``, in order, in the current folder: ``python page_runner.py PAGE``.

A block whose first line is a comment with a file name, ``# gpt.py`` say, is written to that file, without that line. Other
``python`` blocks run in one namespace. Lines of ``sh`` blocks run as commands, but for two: ``pip install -e .`` installs the
project that the page has written into a folder of its own, without dependencies, and ``make`` is a dry run in this repository.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

FILE_NAME = re.compile(r"# ([\w./-]+\.(?:py|toml|json|txt))$")
TOP = Path(__file__).parents[2]
SITE = Path("site")
"""Directory that ``pip`` installs into."""
OPTIONS = [
    "-q",
    "--no-deps",
    "--no-build-isolation",
    "--no-index",
    "--disable-pip-version-check",
    "--upgrade",
    "--target",
    SITE,
]
PROGRAMS = {
    "make": ["make", "-n", "-C", str(TOP)],
    "pytest": [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
    "python": [sys.executable],
    "slapo": [sys.executable, "-c", "from slapo.cli.app import main; main()"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}
"""Commands of this interpreter, whatever lies on the PATH."""


class Block(NamedTuple):
    """A fenced block.

    Args:
        language: The word behind the fence.
        line: Line of the page that its first line is, from 1 on.
        source: Its content.
    """

    language: str
    line: int
    source: str

    @property
    def file(self) -> str:
        """Name of the file that it shows, or ''."""
        found = FILE_NAME.match(self.source.partition("\n")[0])
        return found[1] if found else ""

    @property
    def content(self) -> str:
        """Content of that file."""
        return self.source.partition("\n")[2]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(each[1], text[: each.start(2)].count("\n") + 1, each[2]) for each in found]


def run(page: Path) -> None:
    """Write, execute or start each block."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE.absolute()), os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = [str(Path.cwd()), str(SITE.absolute())]
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.content, encoding="utf-8")
        elif block.language == "python":
            code = compile("\n" * (block.line - 1) + block.source, str(page), "exec")
            exec(code, namespace)  # noqa: S102  the page is ours
        elif block.language == "sh":
            for line in filter(None, (line.partition("  #")[0].strip() for line in block.source.splitlines())):
                _start(line)


def _start(line: str) -> None:
    """Run a command, and end the page where it fails."""
    program, *arguments = shlex.split(line)
    if [program, *arguments] == ["pip", "install", "-e", "."]:
        command = [sys.executable, "-m", "pip", "install", *OPTIONS, "--target", str(SITE), "."]
    else:
        command = [*PROGRAMS[program], *arguments]
    print(f"$ {line}", flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
