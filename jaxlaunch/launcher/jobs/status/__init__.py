"""The objects of a job in its cluster, and its status."""
