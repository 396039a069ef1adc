"""vLLM's own words: the arguments of `vllm serve`, and the lines of its log. Pure; nothing of vLLM is imported."""
