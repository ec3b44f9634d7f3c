"""Compile for chips that are not on this machine."""
