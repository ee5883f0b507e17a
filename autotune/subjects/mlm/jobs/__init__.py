"""The trainer's step and loader, as a trial builds them."""
