"""Memory primitives for Slapo: recompute activations instead of keeping them, or keep them in CPU memory."""
