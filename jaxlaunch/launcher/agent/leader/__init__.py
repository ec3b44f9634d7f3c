"""The leader of the gang, on host 0."""
