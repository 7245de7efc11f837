"""Megatron-core: builds, trains and takes apart a model-stage's part on one slot."""
