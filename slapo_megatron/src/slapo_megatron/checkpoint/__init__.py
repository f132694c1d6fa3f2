"""Checkpoints in the format of ``megatron.core.dist_checkpointing``, planned by Megatron and written by torch. In: an
engine and a folder. Out: files in that folder, or the state that was read and verified before the engine changes.
May import ``optimizer``.
"""
