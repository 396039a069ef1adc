"""Where a run's weights are, and the copy of them on a node's own disk."""
