"""Pure decisions: no torch, files, clock or environment."""
