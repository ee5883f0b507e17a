"""Import and description of your code in a trial's process."""
