"""Training of the bundled trainer, whose settings ``confirm`` verifies."""
