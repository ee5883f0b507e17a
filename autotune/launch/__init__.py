"""Training from a profile, and its status (`train`, `status`).

It trains here, or as a job that resumes until complete.
"""
