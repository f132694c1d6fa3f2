"""Options of ``build(..., target="megatron")`` and the table of what Megatron-Core cannot do. In: keyword arguments
and the program. Out: ``MegatronOptions``, or one ``BuildError``. May import ``process_state``; Megatron is imported
inside functions.
"""

from .options import TAKEN

__all__ = ["TAKEN"]
