"""Terminal output, learning curves and experiment trackers."""
