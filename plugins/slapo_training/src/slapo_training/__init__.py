"""Code that the dialects of all engines share: micro-batches, labels, losses, options."""
