"""Private names of the engines that dialects override still exist; else the override would silently do nothing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .private_names import ATTRIBUTES, SIGNATURES

ROOT = Path(__file__).parents[3]
PUBLIC = {
    "deepspeed": {"deepspeed", "deepspeed.accelerator", "deepspeed.pipe", "deepspeed.utils"},
    "megatron": {
        "megatron.core",
        "megatron.core.dist_checkpointing",
        "megatron.core.dist_checkpointing.mapping",
        "megatron.core.distributed",
        "megatron.core.model_parallel_config",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel",
        "megatron.core.process_groups_config",
        "megatron.core.transformer",
    },
}
"""The documented packages of an engine, which any module may import."""
OF_OTHERS = {"_apply", "_buffers", "_load_state_dict_pre_hooks", "_modules", "_parameters", "_replace", "_unsafe_view"}
OF_OTHERS |= {"_getframe"}
"""Private names of torch and Python."""
COMMON_WORDS = {"__name__", "buffers", "clip_grad", "save", "shared", "tp_group"}
"""Attributes of Megatron's or DeepSpeed's whose names other objects have, too."""


def test_they_are_there() -> None:
    """In a process of its own: both engines warn as they are imported, and an engine changes the values."""
    checks = "check('deepspeed'); check('megatron'); check_values()"
    code = f"from tests.slapo.engines.private_names import check, check_values; {checks}"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert result.returncode == 0, result.stderr[-2000:]


def _sources(engine: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / f"slapo_{engine}/src").rglob("*.py")):
        yield path, ast.parse(path.read_text())


def _imported(tree: ast.Module, engine: str) -> Iterator[str]:
    """Modules of the engine that a file imports, and with a dot before it what it imports from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] == engine)
        elif isinstance(node, ast.ImportFrom) and not node.level and str(node.module).split(".")[0] == engine:
            yield str(node.module)


def _read(tree: ast.Module) -> Iterator[str]:
    """Attributes of other objects than ``self`` that a file reads or sets, by a dot or by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            yield from (each.value for each in node.args[1:2] if isinstance(each, ast.Constant))


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_one_file_alone_has_them(engine: str) -> None:
    names = {path.replace(":", ".").rpartition(".")[2] for path in SIGNATURES[engine]}
    names |= {name for listed in ATTRIBUTES[engine].values() for name in listed.split()}
    files = dict(_sources(engine))
    adapter = next(path for path in files if path.name == f"_{engine}_private.py")
    own = {name for tree in files.values() for node in ast.walk(tree) for name in _defined(node)}
    found = {}
    for path, tree in files.items():
        read, imported = {*_read(tree)}, {*_imported(tree, engine)} - PUBLIC[engine]
        private = {name for name in read if name.startswith("_") and not name.startswith("__")} - own - OF_OTHERS
        if path == adapter:
            odd = private - names | {module for module in imported if not any(module in key for key in SIGNATURES[engine])}
        else:
            odd = private | imported | (read & names - COMMON_WORDS - own)
        if odd:
            found[path.name] = sorted(odd)
    assert not found, "private names of the engine outside of its adapter, or not in the list of private_names.py"


def _defined(node: ast.AST) -> Iterator[str]:
    """Names that the package itself gives to functions, and to attributes of ``self`` or of a class."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        if isinstance(node.value, ast.Name) and (node.value.id in ("self", "cls") or node.value.id[0].isupper()):
            yield node.attr
    elif isinstance(node, ast.AnnAssign | ast.Assign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                yield target.id
