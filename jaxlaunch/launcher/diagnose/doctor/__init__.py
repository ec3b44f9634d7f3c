"""Check a cluster for what would keep a job from running."""
