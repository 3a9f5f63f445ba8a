"""Measurements that write files under results/."""
