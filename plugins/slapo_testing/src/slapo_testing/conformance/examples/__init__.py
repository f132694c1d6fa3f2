"""Examples that an author passes to the conformance kit, and the models and schedules made from them.

This sub-package may import nothing else of the kit.
"""
