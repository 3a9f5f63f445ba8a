"""Benchmarks: time, memory and error of attention kernels; counted operations; result files."""
