"""Families of decoders: what is particular about each."""
