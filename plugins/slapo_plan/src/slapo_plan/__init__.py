"""Memory, traffic and step time of a schedule on any number of ranks, in one process without a GPU.

``records`` are what one run of a stage on fake tensors leaves: operators, collectives, and memory. ``measurement`` runs the
stages, ``hardware`` turns the records into seconds, ``simulation`` replays the order of a pipeline schedule.
"""
