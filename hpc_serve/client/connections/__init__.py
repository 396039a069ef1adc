"""Connections to engines, verified before anything is sent."""
