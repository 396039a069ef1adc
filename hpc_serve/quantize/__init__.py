"""Quantises a model's weights by llm-compressor, in a separate job.

`program` runs in that job, without the rest of hpc-serve.
"""
