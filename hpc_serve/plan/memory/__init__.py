"""What a layout takes of one GPU's memory: weights, KV cache, activations and what torch does not see."""
