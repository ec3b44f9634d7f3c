"""Rendering of a job as a JobSet and the objects that belong to it."""
