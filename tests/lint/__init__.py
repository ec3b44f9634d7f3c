"""Checks of texts in the repository: pages, workflows, lists of packages and names in the sources.

`python -m tests.lint`, part of `make check`, runs every function of these modules whose name begins
with `find_`.
"""
