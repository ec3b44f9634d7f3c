"""The page of a run, its comparison with others, and the dashboard."""
