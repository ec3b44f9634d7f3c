"""The built-in models, and the wrappers of models that users define."""
