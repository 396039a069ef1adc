"""What dead runs left on a node and in the home, and how it is removed."""
