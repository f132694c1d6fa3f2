"""Wait at the end of a process for gloo's worker threads, which release Python tensors.

A worker thread releases the tensors of a collective after the main thread has the result, and needs the GIL for it. Before
version 3.14, Python ends a thread that requests the GIL while the interpreter exits. Here that happens in a C++ destructor:
the process aborts with "terminate called without an active exception" (status 134) after a successful run.
``destroy_process_group`` does not prevent it: it neither waits for these threads, nor ends them while a mesh or a model still
holds the group.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from pathlib import Path

THREAD_NAME = "pt_gloo_runloop"
"""Linux's name of the threads that run gloo's collectives."""
_TASKS = Path("/proc/self/task")
_PAUSE = 0.01
"""Seconds between two checks; a thread that waits for the GIL wakes up every 5 ms."""
_LIMIT = 5.0
"""Timeout in seconds."""


def wait_for_gloo_threads() -> None:
    """Wait until all worker threads of gloo sleep, so that none needs the GIL.

    The wait is not collective: a thread that waits for another rank, which may have ended, sleeps like an idle one.
    """
    if not _TASKS.exists():
        time.sleep(10 * _PAUSE)
        return
    end, before = time.monotonic() + _LIMIT, None
    while (now := _threads()) and time.monotonic() < end:
        if now == before and all(state.startswith("S") for state, *_ in now.values()):
            return
        before = now
        time.sleep(_PAUSE)  # releases the GIL for waiting threads


def _threads() -> dict[str, list[str]]:
    """Return the state and the numbers of context switches of each worker thread of gloo."""
    found = {}
    for task in _TASKS.iterdir():
        with suppress(OSError):  # the thread may have ended
            lines = (line.partition(":") for line in (task / "status").read_text().splitlines())
            facts = {name: value.strip() for name, _, value in lines}
            if facts["Name"] == THREAD_NAME:
                found[task.name] = [facts["State"], *(facts[name] for name in facts if name.endswith("ctxt_switches"))]
    return found


atexit.register(wait_for_gloo_threads)
