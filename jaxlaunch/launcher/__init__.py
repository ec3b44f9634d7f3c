"""The command line: jobs on this machine and on clusters."""
