"""Environments that come along, to be read and to be tried."""
