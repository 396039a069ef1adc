"""Whose logs are read for the cause of a failure, and what goes into a bug report."""
