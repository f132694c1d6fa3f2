"""The results of tuning, in one JSON file that several tuners may share."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..search_space.symbol import TuneError


class Database:
    """A simple database to store the results of tuning in Dict.

    The file is one JSON object, key to data. Every commit reads it, adds its own entry and puts a new file in its place, under
    a lock (``<file>.lock``). So a crash leaves the file before or the file after, and two tuners lose nothing of each other.

    Args:
        db_file_name: Path of the JSON file; None keeps the results in memory. It is made by the first commit.

    Attributes:
        db: The results that are known here, key to data.
    """

    def __init__(self, db_file_name: str | os.PathLike[str] | None = None) -> None:
        self.db_file_name = db_file_name
        self.db: dict[str, Any] = {}

    def load(self) -> None:
        """Load the database from the file. Results in memory that the file does not have are kept; no file is no results.

        Raises:
            TuneError: the file is damaged, or cannot be read; nothing was loaded.
        """
        if self.db_file_name is not None:
            self.db = {**self.db, **self._read()}

    def commit(self, key: str, data: Any) -> None:
        """Commit the data to the database and update the DB file.

        Args:
            key: Name of the entry; an entry of that name is replaced.
            data: Anything that JSON can hold.

        Raises:
            TuneError: JSON cannot hold the data, or the file is damaged or cannot be written; nothing has changed.
        """
        if not isinstance(key, str):
            raise TuneError(f"commit({key!r}): the key is a {type(key).__name__}; give a str, as of Space.cfg_dict_to_str")
        data = json_data(data, f"commit({key!r})")
        self._update(key, lambda _: data)

    def append(self, key: str, items: Sequence[Any]) -> None:
        """Append items to the list of an entry, which is made if need be, and update the DB file.

        Raises:
            TuneError: as for :meth:`commit`, or the entry is no list.
        """
        data = json_data(list(items), f"append({key!r})")

        def with_items(known: Any) -> list[Any]:
            if not isinstance(known, (list, type(None))):
                raise TuneError(f"database({self._name}): entry {key!r} is no list; {_MEND}")
            return [*(known or ()), *data]

        self._update(key, with_items)

    def _update(self, key: str, change: Callable[[Any], Any]) -> None:
        """Replace an entry by what ``change`` makes of it; other processes see the entry before or after."""
        if self.db_file_name is None:
            self.db[key] = change(self.db.get(key))
            return
        try:
            with self._file_lock():
                merged = {**self.db, **self._read()}
                merged[key] = change(merged.get(key))
                self._write(json.dumps(merged, indent=2).encode())
        except OSError as err:
            raise TuneError(f"database({self._name}): it cannot be written: {err}; choose another file") from err
        self.db = merged

    @property
    def _name(self) -> str:
        return repr(os.fspath(self.db_file_name)) if self.db_file_name is not None else "None"

    @property
    def _file(self) -> Path:
        assert self.db_file_name is not None
        return Path(os.path.realpath(self.db_file_name))  # a link stays one

    @contextmanager
    def _file_lock(self) -> Iterator[None]:
        """Hold the file lock in the block; the system releases it if the process ends."""
        lock = os.open(self._sibling_path(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as err:
            raise TuneError(f"database({self._name}): it cannot be read: {err}; choose another file") from err
        except (ValueError, RecursionError) as err:
            raise TuneError(f"database({self._name}): the file is damaged: {err}; {_MEND}") from err
        if not isinstance(found, dict):
            kind = type(found).__name__
            raise TuneError(f"database({self._name}): the file holds a {kind}, not the results of a tuner; {_MEND}")
        return found

    def _write(self, content: bytes) -> None:
        """Replace the file atomically; overwrite the temporary file of a writer that was killed, as the lock is held."""
        unfinished = self._sibling_path(".unfinished")
        try:
            with open(unfinished, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, self._file)
        except OSError:  # a full disk should not be fuller now
            unfinished.unlink(missing_ok=True)
            raise
        folder = os.open(self._file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _sibling_path(self, suffix: str) -> Path:
        return self._file.with_name(self._file.name + suffix)


def json_data(data: Any, purpose: str) -> Any:
    """Return data as it comes back from a JSON file: tuples as lists, NumPy's numbers as Python's.

    Args:
        data: The data.
        purpose: How the error begins.

    Raises:
        TuneError: JSON cannot hold the data.
    """
    try:
        return json.loads(json.dumps(data, allow_nan=False, default=_number))
    except (TypeError, ValueError, RecursionError) as err:
        raise TuneError(f"{purpose}: JSON cannot hold {data!r}: {err}; use numbers, text, lists and dicts") from err


_MEND = "put a copy of it back, or move it away to start anew"


def _number(value: Any) -> Any:
    """Return NumPy's and torch's single numbers as Python's."""
    if callable(item := getattr(value, "item", None)):
        return item()
    raise TypeError(f"a value is of type {type(value).__name__}")
