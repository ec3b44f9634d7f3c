"""Reader of YAML that keeps the line of every value, and writer."""
