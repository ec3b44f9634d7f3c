"""The state of a job in its cluster, read from its objects and its leader's log."""
