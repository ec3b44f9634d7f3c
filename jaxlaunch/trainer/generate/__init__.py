"""Sampling from language models."""
