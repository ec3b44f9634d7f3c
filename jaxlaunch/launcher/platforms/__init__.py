"""Facts about the nodes of each platform: labels, taints, machine types and networks."""
