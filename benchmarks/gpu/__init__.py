"""The GPU check: what a machine with a GPU reaches, measured in a few minutes."""
