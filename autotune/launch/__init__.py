"""Training from a profile, here or as a job that resumes until complete, and its status (`train`, `status`)."""
