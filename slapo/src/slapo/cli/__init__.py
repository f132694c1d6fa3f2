"""The ``slapo`` command line."""
