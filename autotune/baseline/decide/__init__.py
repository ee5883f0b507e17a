"""Pure decisions on a comparison: its unit and precision, and the cost of a tuning."""
