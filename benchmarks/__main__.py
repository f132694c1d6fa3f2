"""Runs every benchmark in a process of its own and prints one page: ``make -s bench > benchmarks/README.md``."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

PAGE = """# Benchmarks

Run by hand with `make bench`; no test asserts a time. Each compares with a peer measured in the same run: read the ratios, the
seconds are this machine's.

{cores} cores, {machine}, Python {python}, torch {torch}, transformers {transformers}
"""


def main() -> int:
    """Print the page; the status is that of the worst benchmark."""
    page = PAGE.format(
        cores=os.cpu_count(),
        machine=platform.machine(),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=version("transformers"),
    )
    print(page, flush=True)
    status = 0
    for file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        result = subprocess.run([sys.executable, "-m", f"benchmarks.{file.stem}"])
        if result.returncode:
            print(f"`{file.name}` failed with status {result.returncode}", flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
