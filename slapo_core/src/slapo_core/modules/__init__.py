"""Facts about the live module tree: paths, holders of a module or parameter, parameter facts, forward arguments.

Functions here take an ``nn.Module`` or a parameter and return facts about it. They keep no state except attributes on modules
and parameters. This sub-package may import ``reporting``.
"""
