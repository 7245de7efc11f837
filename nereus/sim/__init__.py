"""The simulated world: the same controller over a cluster of measured times, real traces and random workloads."""
