"""From a JobSpec to the JobSet, by subject."""
