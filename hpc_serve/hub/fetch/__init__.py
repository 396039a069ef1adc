"""Fetches a model's files from the hub into the cache that jobs read: only those that an engine needs, and each byte
once. huggingface_hub speaks with the hub; it is imported in `hub_repository` alone, when something is fetched.
"""
