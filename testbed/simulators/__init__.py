"""Simulated machines, clusters, loaders and tunings, whose true answer is known."""
