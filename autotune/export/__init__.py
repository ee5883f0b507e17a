"""Settings for other trainers (`profile export`)."""
