"""Translation of configurations of TRL and verl."""
