"""Pipeline parallelism: cuts of a model, the search for balanced ones, and the program of stages they make."""
