"""Predicted speed of a traced step (`estimate`).

Step time, tokens/s and MFU follow from the constants of a machine.
"""
