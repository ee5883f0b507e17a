"""Baseline."""
