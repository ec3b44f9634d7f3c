"""The event loop, connections, output and limits of the container."""
