"""Environment of the tests that compile."""

from __future__ import annotations

import os

# in this process: a pool of compiling processes would outlive a test
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
