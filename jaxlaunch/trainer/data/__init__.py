"""Reads examples in a reproducible order, augments images, and makes batches."""
