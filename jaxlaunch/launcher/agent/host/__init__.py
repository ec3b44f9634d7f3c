"""The member of the gang on one host, and its processes."""
