"""Devices: the mesh, sharding, compilation and processes."""
