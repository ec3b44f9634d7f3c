"""Logic that hosts and leader share: configuration, protocol, progress, root causes."""
