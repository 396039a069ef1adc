"""The place of a run's weights, and their copy on a node's own disk."""
