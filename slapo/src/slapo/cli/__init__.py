"""The ``slapo`` command line: one file per command, and the commands of plugins. In: ``sys.argv``. Out: text and an
exit status. May import ``training``, ``launch`` and ``run_data``.
"""
