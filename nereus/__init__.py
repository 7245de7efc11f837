"""Nereus: an RL post-training runtime whose parallel layout changes live."""

__version__ = "0.1.0"
