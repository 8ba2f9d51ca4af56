"""Errors of policy gradients, best group sizes, diagnoses and intervals."""
