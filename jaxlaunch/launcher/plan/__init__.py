"""The memory of a job before it runs."""
