"""The checks, each a pure function over facts: `NODE_CHECKS` look at one node, those in `between` at all nodes."""
