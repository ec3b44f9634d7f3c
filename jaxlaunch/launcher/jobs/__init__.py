"""Jobs in a cluster: submission, wait, stop and deletion, and their status and logs."""
