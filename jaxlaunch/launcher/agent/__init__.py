"""The agent: the supervisor of one host, and the leader of the gang."""
