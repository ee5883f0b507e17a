"""The profile: its tables, reading and writing, explanation, verification and approval (`profile`)."""
