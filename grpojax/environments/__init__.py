"""Environments and tools on the host, with two examples and a jittable one."""
