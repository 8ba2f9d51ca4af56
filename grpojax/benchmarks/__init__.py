"""What `python -m grpojax.bench` is made of."""
