"""Seconds and bytes of training, inference and generation from shapes and rates, calibrated on what is measured: pure."""
