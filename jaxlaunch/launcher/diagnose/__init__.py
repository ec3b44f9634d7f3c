"""Say why a job does not run: `explain` and `doctor`."""
