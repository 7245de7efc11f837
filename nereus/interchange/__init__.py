"""Foreign checkpoints: Hugging Face folders, torch DCP, Megatron torch_dist and NeMo 2, into Nereus's own and out."""
