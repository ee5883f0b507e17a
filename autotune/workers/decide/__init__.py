"""Decide."""
