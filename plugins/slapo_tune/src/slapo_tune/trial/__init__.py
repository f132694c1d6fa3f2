"""One run of the training script: its process and environment, signals, the end of everything it started, and its
throughput. In: a command line and the values of a configuration. Out: its output and throughput. May import
``search_space`` for its errors.
"""
