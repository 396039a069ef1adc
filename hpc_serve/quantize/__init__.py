"""Quantisation of a model's weights by llm-compressor, as a job of its own."""
