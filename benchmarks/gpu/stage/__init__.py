"""What the check measures: a room for each stage; none of them loads torch."""
