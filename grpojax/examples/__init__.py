"""Example programs, each a single file that calls only public functions."""
