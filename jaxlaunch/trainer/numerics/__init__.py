"""Precision, rematerialization, FLOPs and memory."""
