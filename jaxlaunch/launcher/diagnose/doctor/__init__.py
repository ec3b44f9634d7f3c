"""`launcher doctor`: checks of a cluster for what would keep a job from running."""
