"""Memory primitives for Slapo: recompute activations instead of keeping them."""
