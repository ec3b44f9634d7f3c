"""The data that hosts and leader share: configuration, protocol, progress, root causes."""
