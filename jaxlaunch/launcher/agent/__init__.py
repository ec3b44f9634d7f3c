"""The agent of one host, which supervises its processes and, on host 0, leads the gang."""
