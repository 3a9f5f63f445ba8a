"""Benchmarks: attention kernels and training steps, by time, memory and error; result files."""
