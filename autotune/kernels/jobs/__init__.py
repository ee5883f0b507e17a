"""Child processes; the only place for torch."""
