"""Random numbers on many ranks."""

from slapo_core import get_cuda_rng_tracker, is_random_seed_set, set_random_seed

__all__ = ["get_cuda_rng_tracker", "is_random_seed_set", "set_random_seed"]
