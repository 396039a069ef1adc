"""Accelerators, the machines made of them, and the slices that TPUs come in."""
