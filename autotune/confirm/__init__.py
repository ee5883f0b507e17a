"""Confirmation of a tuned profile: its own settings, measured as training will run.

``confirm_profile`` measures the profile's settings in windows of training; of the
bundled trainer also other splits of the global batch that are nearly as fast. Then it
trains for a short time. The profile keeps the rate that was promised, and the one that
was delivered.
"""
