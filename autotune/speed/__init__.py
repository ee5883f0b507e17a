"""Predicted step time, tokens/s and MFU of a traced step, from the constants of a machine (`estimate`)."""
