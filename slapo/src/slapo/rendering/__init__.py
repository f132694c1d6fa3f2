"""Text and HTML for ``print(sch)``, ``print(program)``, ``print(engine)`` and notebooks.

A schedule, program or engine enters, and text or HTML leaves. In between it is a ``View``: a title, facts and module trees, as
plain data. Nothing is traced, communicated or changed. These modules import core alone: of an engine they read what all
engines have.
"""
