"""Configurations of TRL and verl as ours."""
