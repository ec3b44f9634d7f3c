"""The run folder: layout and lock, records and starts, history, journals."""
