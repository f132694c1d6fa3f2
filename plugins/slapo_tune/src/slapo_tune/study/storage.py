"""Storages of studies: the file of a classic database, the URL of an Optuna storage, or memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, get_storage
from optuna.storages.journal import BaseJournalBackend

from ..search_space.symbol import TuneError
from .database import Database

JOURNAL_KEY = "slapo_tune.journal"
"""Entry of the database with the journal of its studies; the other entries are records of trials."""


class DatabaseJournal(BaseJournalBackend):
    """Journal of Optuna's operations, kept as a list in one entry of a ``Database``.

    The database replaces its file atomically under a lock, so a tuner that is killed, or a full disk, leaves whole operations.

    Args:
        database: The database, which has a file.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seen: tuple[int, int, int] | None = None

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """Return the operations from a number on."""
        if self._seen is None or self._seen != self._version():
            self._seen = self._version()
            self._database.load()
        logs = self._database.db.get(JOURNAL_KEY, [])
        if not isinstance(logs, list):
            raise TuneError(f"database({self._name}): entry {JOURNAL_KEY!r} is damaged; remove it to start anew")
        try:
            return [json.loads(line) for line in logs[log_number_from:]]
        except (TypeError, ValueError) as err:
            raise TuneError(
                f"database({self._name}): entry {JOURNAL_KEY!r} is damaged: {err}; remove it to start anew"
            ) from err

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append operations."""
        self._database.append(JOURNAL_KEY, [json.dumps(log, separators=(",", ":")) for log in logs])

    @property
    def _name(self) -> str:
        return repr(os.fspath(self._database.db_file_name or ""))

    def _version(self) -> tuple[int, int, int] | None:
        """Return what changes when the file is replaced; None if there is none."""
        try:
            found = os.stat(os.path.realpath(self._database.db_file_name or ""))
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def open_storage(database: str | os.PathLike[str] | BaseStorage | None) -> tuple[BaseStorage, Database | None]:
    """Return the Optuna storage of a study, and the classic database that gets its records too.

    Args:
        database: Path of a classic database, a JSON file; the URL of an Optuna storage, such as ``"sqlite:///tune.db"``; a
            storage; None keeps everything in memory.

    Raises:
        TuneError: the file is damaged or cannot be written, or Optuna cannot open the storage.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if database is None:
        return InMemoryStorage(), None
    if isinstance(database, BaseStorage):
        return database, None
    name = os.fspath(database)
    if "://" in name:
        try:
            return get_storage(name), None
        except Exception as err:
            reason = str(err).partition("\n")[0]
            raise TuneError(f"database({name!r}): optuna cannot open it: {reason}; give another URL") from err
    if not os.access(Path(os.path.realpath(name)).parent, os.W_OK):
        raise TuneError(f"database({name!r}): its folder is not there, or cannot be written to; make it, or choose another")
    classic = Database(name)
    classic.load()
    return JournalStorage(DatabaseJournal(classic)), classic
