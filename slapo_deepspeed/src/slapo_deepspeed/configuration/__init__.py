"""Options of ``build(..., target="deepspeed")``, the DeepSpeed configuration made from them, and the table of what
DeepSpeed cannot do. In: keyword arguments, a config dict or JSON file, and the program. Out: ``DeepSpeedOptions``
and a validated configuration, or one ``BuildError``. May import ``process_state``; DeepSpeed is imported inside
functions.
"""
