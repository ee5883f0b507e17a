"""The run record: its schema, its writer, the metrics of a step, and progress on the console."""
