"""Facts about the live module tree: paths, the places that hold a module or parameter, facts of a parameter, forward
arguments.

Functions here take an ``nn.Module`` or a parameter and return what is known of it. They keep no state of their own
but for attributes on modules and parameters. May import ``reporting``.
"""
