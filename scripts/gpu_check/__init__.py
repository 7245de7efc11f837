"""A check of one GPU or one node, whose report goes with a bug."""
