"""The page a run leaves behind: one self-contained ``report.html``."""
