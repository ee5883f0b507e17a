"""Training from a profile, here or as a job that resumes until done; and its status (`train`, `status`)."""
