"""Examples that an author gives to the conformance kit, and the models and schedules made from them.

May import nothing else of the kit.
"""
