"""Environments and tools on the host, and a jittable example environment."""
