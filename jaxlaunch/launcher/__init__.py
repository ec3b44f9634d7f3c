"""The launcher: it runs jobs on this machine and on clusters."""
