"""Carries out the RL phases: batches, advantages, losses, rewards, tasks and the byte tokenizer."""
