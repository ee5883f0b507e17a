"""Comparison with untuned settings, and the cost of tuning (`baseline`).

The tuned settings are compared with defaults and with the paper baseline.
"""
