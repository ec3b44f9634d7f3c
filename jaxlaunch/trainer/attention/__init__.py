"""Implementations of attention, and the choice between them."""
