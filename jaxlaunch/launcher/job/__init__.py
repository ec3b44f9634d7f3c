"""The schema of job.yaml, and the validation that reports all faults of a file at once."""
