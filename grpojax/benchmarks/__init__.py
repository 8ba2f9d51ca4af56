"""Implementation of `python -m grpojax.bench`."""
