"""Staging: a copy of the dataset on node-local disk."""
