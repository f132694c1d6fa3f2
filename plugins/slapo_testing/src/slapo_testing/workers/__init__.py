"""Pool of gloo worker processes that run test functions on several ranks.

The pool starts on first use and ends with the test session. This sub-package may import nothing else of this package.
"""
