"""Child processes that run your code."""
