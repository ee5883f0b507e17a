"""The tuned settings against defaults and the paper recipe (`baseline`), and when tuning is paid back."""
