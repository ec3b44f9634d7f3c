"""Traces of steps, and the breakdown of their time."""
