"""The built-in models, and users' models."""
