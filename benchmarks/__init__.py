"""What the project measures about itself: ratios against named references, and what a GPU machine has."""
