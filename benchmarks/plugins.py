"""Cost of plugins: ``import slapo`` beyond ``import torch``, and ``list_primitives()`` with 200 plugin distributions."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.distributions import write_distribution

NUM_PLUGINS = 200
REPEATS = 7

PLUGIN = """
from slapo_core.hookspecs import hookimpl

@hookimpl
def slapo_primitives():
    return {{"primitive_{index}": "slapo_plugin_{index}.heavy:Primitive"}}

@hookimpl
def slapo_after_apply(schedule, step):
    pass
"""

IMPORT = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import slapo
imported = time.perf_counter()
slapo.create_schedule  # the facade imports what stands behind a name when it is first used
print(middle - start, imported - middle, time.perf_counter() - middle)
"""

LIST = """
import importlib, sys, time
import slapo_core
start = time.perf_counter()
for index in range({count}):
    importlib.import_module(f"slapo_bench_{{index}}_plugin")
middle = time.perf_counter()
names = slapo_core.list_primitives()
print(middle - start, time.perf_counter() - middle)
assert len([name for name in names if name.startswith("primitive_")]) == {count}, names
"""

PLUGGY = """
import importlib, time
import pluggy, slapo_core
from slapo_core import hookspecs
for index in range({count}):
    importlib.import_module(f"slapo_bench_{{index}}_plugin")
start = time.perf_counter()
manager = pluggy.PluginManager("slapo")
manager.add_hookspecs(hookspecs)
manager.load_setuptools_entrypoints("slapo")
found = manager.hook.slapo_primitives()
print(time.perf_counter() - start)
"""


def measure(script: str, site: str = "") -> list[float]:
    """The least of what a script prints over several fresh processes, in seconds: other load on the machine only adds."""
    environ = {**os.environ, "PYTHONPATH": site}
    rows = []
    for _ in range(REPEATS):
        result = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
        rows.append([float(value) for value in result.stdout.split()])
    return [min(column) for column in zip(*rows, strict=True)]


def listing(count: int) -> tuple[float, float]:
    """Seconds of ``list_primitives()`` and of pluggy's own loader with so many distributions, imports not counted."""
    with tempfile.TemporaryDirectory() as site:
        for index in range(count):
            write_distribution(Path(site), f"slapo-bench-{index}", PLUGIN.format(index=index))
        _, ours = measure(LIST.format(count=count), site)
        (pluggy,) = measure(PLUGGY.format(count=count), site)
    return ours, pluggy


def main() -> None:
    """Print the section."""
    torch, slapo, used = measure(IMPORT)
    print("## Plugins\n\n| what | s | goal | peer | s | ratio |\n|---|---|---|---|---|---|")
    print(f"| `import slapo` after torch | {slapo:.3f} | 0.15 | `import torch` | {torch:.3f} | {slapo / torch:.2f} |")
    print(f"| the same and `slapo.create_schedule` | {used:.3f} | 0.15 | `import torch` | {torch:.3f} | {used / torch:.2f} |")
    for count in (0, NUM_PLUGINS // 2, NUM_PLUGINS):
        ours, peer = listing(count)
        goal = "0.050" if count == NUM_PLUGINS else ""
        what = f"`list_primitives()`, {count} more distributions"
        print(f"| {what} | {ours:.4f} | {goal} | pluggy's own loader | {peer:.4f} | {ours / peer:.2f} |")
    print()


if __name__ == "__main__":
    main()
