"""Devices: the mesh, what is split over it, compilation, and processes."""
