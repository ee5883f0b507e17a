"""The profile: its tables, reading and writing, explanation, verification, approval and export (`profile`)."""
