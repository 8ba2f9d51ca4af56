"""Model families: configuration and parameter names of Hugging Face."""
