"""Pure decisions on a comparison: the recipes, and the cost of a tuning."""
