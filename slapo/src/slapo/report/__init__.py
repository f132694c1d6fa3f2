"""Report of a run: one self-contained ``report.html`` with losses, the module tree, ranks and the pipeline timeline.
In: a ``RunRecord``. Out: a file. May import ``run_data``; charts and tables are those of ``slapo_report``.
"""
