"""Replicas that fall silent while they have requests."""
