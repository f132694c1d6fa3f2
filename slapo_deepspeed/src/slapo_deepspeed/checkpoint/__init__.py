"""Checkpoints written by DeepSpeed itself, with an index of where each tensor lies, so that they load at another
layout or ZeRO stage. In: an initialized engine and a folder. Out: files in that folder, or a ``Checkpoint`` that
was read and verified before the engine changes. May import ``optimizer``, ``process_state`` and ``configuration``.
"""
