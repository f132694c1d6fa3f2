"""Run-time checks for ZeRO: parameters read outside the module that holds them, and gradients produced in a different
order per replica. In: the model and its parameters. Out: a ``BuildError`` that names the parameter, before a wrong
value or gradient is used. May import ``process_state``.
"""
