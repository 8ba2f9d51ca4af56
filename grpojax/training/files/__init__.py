"""Files of a run: its directory, and the models that it reads."""
