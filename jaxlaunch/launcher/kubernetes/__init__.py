"""Send requests to the API server, and read Kubernetes' objects."""
