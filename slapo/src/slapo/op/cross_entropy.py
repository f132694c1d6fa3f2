"""Losses of logits whose vocabulary is sharded."""

from slapo_sharding.communication import ParallelCrossEntropy, vocab_parallel_cross_entropy

__all__ = ["ParallelCrossEntropy", "vocab_parallel_cross_entropy"]
