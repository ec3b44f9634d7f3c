"""Programs of `launcher prepare`."""
