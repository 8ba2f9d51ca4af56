"""The paper's experiments as programs; see README.md beside this file."""
