"""Pages of reference that are written from the code: commands, profile, exit codes, environment variables."""
