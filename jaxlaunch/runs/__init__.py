"""The run folder: its layout and lock, its records and journals, and decisions from them."""
