"""Pipeline parallelism: where to cut, and how a model comes apart there."""
