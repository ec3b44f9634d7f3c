"""What the clusters of each provider need."""
