"""``slapo kernels``: the implementation of each kernel on this machine, and the reasons against the others."""

from __future__ import annotations

import json
from typing import Any

import torch

from .dispatch.dispatcher import explain
from .dispatch.kernels import KERNELS


def register(app: Any) -> None:
    """Add the command to the command line."""
    import typer

    def kernels(as_json: bool = typer.Option(False, "--json", help="Print data instead of a table.")) -> None:
        """List the implementations of each kernel: the one used here, and why others cannot be used."""
        rows = kernel_rows("cuda" if torch.cuda.is_available() else "cpu")
        typer.echo(json.dumps({"kernels": rows}, indent=2) if as_json else table_of(rows))

    app.command()(kernels)


def kernel_rows(device: str) -> list[dict[str, Any]]:
    """Return a row per implementation of each kernel, in order of preference, with its use on a type of device."""
    return [
        {
            "kernel": name,
            "implementation": each.implementation.name,
            "distribution": each.implementation.provider,
            "device": device,
            "used": each.chosen,
            "lacks": each.lacks,
        }
        for name in KERNELS
        for each in explain(name, device)
    ]


def table_of(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = [("kernel", "implementation", "distribution", f"on {rows[0]['device']}")]
    before = None
    for row in rows:
        usable = row["lacks"] or ("used" if row["used"] else "usable")
        lines.append((row["kernel"] if row["kernel"] != before else "", row["implementation"], row["distribution"], usable))
        before = row["kernel"]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
