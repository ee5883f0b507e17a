"""Functions for Python programs: what the commands do, for code of yours."""
