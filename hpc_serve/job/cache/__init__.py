"""Keeps what an engine has compiled for its next start: on the node, and as an archive in the home."""
