"""The leader of the gang, which runs on host 0."""
