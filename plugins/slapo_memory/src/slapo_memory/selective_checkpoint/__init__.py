"""Selective checkpointing: which operator outputs a checkpoint keeps, by policy or by a budget of bytes. In: a policy,
or a budget with example inputs. Out: the contexts of ``torch.utils.checkpoint``. May import ``forward_state``.
"""
