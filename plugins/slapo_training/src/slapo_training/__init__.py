"""Code that the dialects of all engines share: micro-batches, labels, losses, options."""

from .distributed import gloo_threads as gloo_threads  # waits for them as the process ends
