"""Example programs: single files, with public functions alone."""
