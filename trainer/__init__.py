"""A data-parallel masked-LM trainer that consumes tuned profiles."""
