"""Fetches the model files that an engine needs from the hub into the cache that jobs read.

huggingface_hub brings them. Only `hub_repository` imports it, when something is fetched.
"""
