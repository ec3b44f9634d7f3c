"""The mesh of devices, and the sharding of arrays over it."""
