"""Confirmation of a tuned profile: its own settings, measured as training will run.

``confirm_profile`` measures the profile's batch split, and others that are nearly as
fast, in windows of training; then it trains for a short time with the trainer's own
loop. The profile keeps the rate that was promised, and the one that was delivered.
"""
