"""Processes of ``slapo train`` on one machine: start one per rank, let them meet on the loopback address, end them
together. In: a function and the settings of a run. Out: nothing, or the error of the rank that failed first.
Imports ``run_data``; ``signals`` and ``errors`` import nothing heavy, as the command line imports them before
torch.
"""
