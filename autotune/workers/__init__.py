"""The fewest DataLoader workers that keep the devices busy (`workers`)."""
