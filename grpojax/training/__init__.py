"""What the programs are made of: from a config to a finished run."""
