"""Input of the tuner: the configuration file, and the command line of the training script. In: a path and
arguments. Out: the initial space, and the arguments of a trial with values in place of symbols. May import
``search_space``.
"""
