"""Terminal output and experiment trackers."""
