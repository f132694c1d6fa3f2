"""Data of one run: the settings it was asked for, the record it leaves, and the installed versions.
In: flags of the command line. Out: plain data for training and for the report. Lowest room; ``settings`` and
``versions`` import nothing heavy.
"""
