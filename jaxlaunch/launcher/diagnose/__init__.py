"""Diagnosis of jobs that do not run: `launcher explain` and `launcher doctor`."""
