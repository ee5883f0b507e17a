"""Searches that run trials: ask what to measure, measure it, write it down, decide."""
