"""The order of examples, and how they become batches."""
