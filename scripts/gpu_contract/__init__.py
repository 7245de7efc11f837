"""Whether the newest Megatron-core, vLLM and Ray still have what the engines touch of them: `make gpu-contract`."""
