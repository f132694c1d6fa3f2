"""Search over layouts: which ones fit, which one is fastest, and why the others are not.

``model_record`` measures a model once for each degree of tensor parallelism, ``stage_costs`` puts its parts together for any
cut and any number of rows, ``layouts`` lists what the constraints allow, ``candidates`` says what each costs, and ``plan`` is
the entry. A model, a batch and a ``Hardware`` enter; a ``Plan`` leaves.
"""
