"""Parts of `python -m grpojax.bench`."""
