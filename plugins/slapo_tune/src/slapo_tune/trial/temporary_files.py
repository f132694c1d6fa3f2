"""Temporary files of trials: the sentence on a folder that cannot hold them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..search_space.symbol import TuneError

LEAST_BYTES = 2**16
"""Free bytes of a disk below which the output of a trial may be lost."""


def temporary_folder() -> str:
    """Return the folder of temporary files, or how Python looked for one if none can be written to."""
    with suppress(OSError):
        return tempfile.gettempdir()
    return os.environ.get("TMPDIR", "any folder for temporary files")


def is_full(folder: str) -> bool:
    """Return True if a folder's disk has no room for the output of a trial."""
    return os.path.isdir(folder) and shutil.disk_usage(folder).free < LEAST_BYTES


def full_disk() -> TuneError:
    """Return the error on a full disk of temporary files."""
    return TuneError(f"tune: the disk of {temporary_folder()} is full; make room, or set TMPDIR to another folder")


@contextmanager
def temporary_file_errors() -> Iterator[None]:
    """Raise an error of temporary files in a block as one sentence."""
    try:
        yield
    except OSError as err:
        if is_full(folder := temporary_folder()):
            raise full_disk() from err
        reason = err.strerror or str(err)
        raise TuneError(f"tune: {folder} cannot hold temporary files: {reason}; set TMPDIR to another folder") from err
