"""Profiles, tunings, runs or datasets side by side (`compare`)."""
