"""Discovery of plugins, and the registry of the primitives, dialects and models that they provide.

A ``Registry`` reads the entry points of the group ``slapo`` and imports each class at its first use. A plugin that fails is
recorded; the others work. This sub-package may import ``interfaces`` and ``reporting``.
"""
