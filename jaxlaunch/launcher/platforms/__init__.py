"""Requirements of the clusters of each provider."""
