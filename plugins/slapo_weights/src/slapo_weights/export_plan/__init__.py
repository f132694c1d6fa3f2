"""Plan of an export, the same on every rank: the origin of each tensor, the ranks that send its parts, and the file it
goes to. In: the pieces that each rank holds and the unmodified model. Out: a ``Plan``; no data is sent here. May
import ``huggingface``, ``tensor_views`` and ``safetensors_files``.
"""
