"""Distributed."""
