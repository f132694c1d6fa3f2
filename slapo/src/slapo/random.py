"""Random numbers on many ranks."""

from slapo_core import MODEL_PARALLEL_RNG, get_cuda_rng_tracker, is_random_seed_set, set_random_seed
from slapo_core import RNGTracker as CudaRNGStatesTracker

__all__ = [
    "CudaRNGStatesTracker",
    "get_cuda_rng_tracker",
    "is_random_seed_set",
    "model_parallel_cuda_manual_seed",
    "set_random_seed",
]


def model_parallel_cuda_manual_seed(seed: int, tp_rank: int) -> int:
    """Seed the default generators alike in a tensor-parallel group, and the state that sharded regions fork by rank.

    Returns:
        The seed of the latter.
    """
    set_random_seed(seed, tp_rank=tp_rank)
    return get_cuda_rng_tracker().seeds[MODEL_PARALLEL_RNG]
