"""Example programs: single files that call only public functions."""
