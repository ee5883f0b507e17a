"""Jobs of a comparison, in a trial's child process."""
