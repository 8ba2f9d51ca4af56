"""Disks, the Hub, records and locks."""
