"""The pages of ``docs/`` build without a warning, and all code on them runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import TOP
from .page_runner import blocks

DOCS = TOP / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if {block.language for block in blocks(page)} & {"python", "sh"}]
READMES = [
    TOP.glob(each) for each in ("*.md", "*/README.md", "benchmarks/*/README.md", "examples/*/README.md", "plugins/*/README.md")
]
MARKDOWN = sorted({*DOCS.rglob("*.md"), *(page for found in READMES for page in found)})
LANGUAGES = {"python", "sh", "toml", "text", "{eval-rst}", "{toctree}"}
"""The languages of blocks; Python that does not run, and shell that is not a command, have none."""


def name_of(page: Path) -> str:
    """Return the path within ``docs/``."""
    return page.relative_to(DOCS).as_posix()


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_code_on_the_page_runs(page: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(Path(__file__).with_name("page_runner.py")), str(page)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=name_of)
def test_every_block_says_a_language_that_is_checked(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks(page)), "a fence is indented, or has none beside it"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_pages_build_without_a_warning_and_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    for page in tmp_path.rglob("*.html"):
        assert not re.findall(r'(?:src="|<link[^>]*href="|@import |url\()["\']?https?:', page.read_text(encoding="utf-8")), page


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", each)).lower().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.relative_to(TOP).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_make_docs_is_strict() -> None:
    (recipe,) = re.findall(r"^docs: setup\n\t(.*)$", (TOP / "Makefile").read_text(), re.MULTILINE)
    assert " -W " in recipe
