"""Report of a failed or interrupted run on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ..launch.errors import InterruptedRunError, RankError


@contextmanager
def reported_run_errors() -> Iterator[None]:
    """Print the error of a rank, or of a signal, to stderr and exit with its status."""
    try:
        yield
    except (RankError, InterruptedRunError) as err:
        typer.echo(f"{err.traceback}slapo: {err}", err=True)
        raise typer.Exit(err.exit_code) from None
