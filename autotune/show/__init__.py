"""Values to text. Nothing here prints."""
