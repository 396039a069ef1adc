"""The choice of a layout: which there are, which fit, which one is chosen, and what would help where none fits."""
