"""Language models as pure functions, and the files that they come from."""
