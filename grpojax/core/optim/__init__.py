"""Gradient transformations: Adafactor's, and Adam's with rounded moments."""
