"""The programs that `launcher prepare` runs."""
