"""Preparation of tokenised datasets from raw data."""
