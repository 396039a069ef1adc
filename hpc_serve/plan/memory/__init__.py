"""The memory of one GPU under a layout: weights, KV cache, activations, and memory that torch does not see."""
