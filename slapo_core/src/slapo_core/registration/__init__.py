"""Discovery of plugins, and the registry of the primitives, dialects and models that they provide.

Entry points of the group ``slapo`` enter; a ``Registry`` leaves, which imports each class when it is first used. A
plugin that fails is recorded and the others work. May import ``interfaces`` and ``reporting``.
"""
