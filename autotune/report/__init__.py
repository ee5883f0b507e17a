"""The report: the sections of all packages in one page (`report`)."""
