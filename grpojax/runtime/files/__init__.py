"""Disks, buckets, the Hub, records and locks."""
