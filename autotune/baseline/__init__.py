"""Speedup of the tuned settings over defaults and the paper baseline (`baseline`), and the cost of tuning."""
