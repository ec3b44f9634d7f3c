"""`launcher exec`, `shell`, `port-forward` and `copy`: a way into the process of a rank."""
