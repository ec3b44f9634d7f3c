"""`launcher exec`, `shell`, `port-forward` and `copy`: enter the pod of a rank."""
