"""Tokenizers, chat templates and control tokens."""
