"""Stages of a tuning: each measures at a site and writes what it found into a profile."""
