"""The experiments of the paper, each a program."""
