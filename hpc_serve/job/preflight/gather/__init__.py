"""What gathers the facts of a node: one function for each group, each in a thread of its own (`node_side`)."""
