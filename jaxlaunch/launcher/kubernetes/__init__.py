"""Client of the Kubernetes API server, and functions that read its objects."""
