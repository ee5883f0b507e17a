"""Pure verbs: from measurements to decisions."""
