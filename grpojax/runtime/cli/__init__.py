"""Command lines, config files and declared settings."""
