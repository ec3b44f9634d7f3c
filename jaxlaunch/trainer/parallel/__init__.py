"""The mesh, and the axes of arrays on it."""
