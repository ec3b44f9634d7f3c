"""Typed records that agent, launcher and trainer exchange as JSON."""
