"""Progress, pictures and trackers."""
