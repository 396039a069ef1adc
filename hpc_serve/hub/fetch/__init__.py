"""Fetches the model files that an engine needs from the hub into the cache that jobs read. Each byte comes once.

huggingface_hub speaks with the hub. Only `hub_repository` imports it, when something is fetched.
"""
