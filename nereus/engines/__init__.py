"""What runs the models: Megatron-core trains, vLLM generates, over one torch.distributed world of the live slots.

The only package of nereus that imports those libraries.
"""
