"""Measurements of the project itself.

They are ratios against named references, and what a GPU machine has. Each module is a
program: ``python -m benchmarks.NAME``. ``bars`` has the figures with a target that they
share.
"""
