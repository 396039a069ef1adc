"""Connections to engines, for threads and event loops. Each is verified before anything is sent on it."""
