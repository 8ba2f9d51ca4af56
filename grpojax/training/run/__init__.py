"""A run from its opening to its end, and its directory."""
