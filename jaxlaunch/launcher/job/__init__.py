"""From job.yaml to a JobSpec, or to all of its errors."""
