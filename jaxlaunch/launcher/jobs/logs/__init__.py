"""The logs of a job."""
