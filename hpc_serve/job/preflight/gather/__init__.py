"""Gathers the facts of a node: one function for each group. `node_side` runs each in its own thread."""
