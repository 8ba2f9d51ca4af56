"""Language models as pure functions, and readers and writers of their files."""
