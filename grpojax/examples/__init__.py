"""Programs to read: one file each, of public functions alone."""
