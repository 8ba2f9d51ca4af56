"""A module per model family: Hugging Face's configuration and names."""
