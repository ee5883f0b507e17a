"""Settings of a run: their schema, presets, and how profile, command line and environment combine. No torch."""
