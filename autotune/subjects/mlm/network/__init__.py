"""Gradient synchronisation of the bundled trainer, measured across ranks."""
