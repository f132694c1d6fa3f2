"""A pool of gloo worker processes that run test functions on several ranks.

The pool starts when it is first needed and ends with the test session. May import nothing else of this package.
"""
