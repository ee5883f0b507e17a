"""Trials that run in the caller's own process."""
