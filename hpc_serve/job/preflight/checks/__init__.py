"""The checks, each a pure function over facts: of one node, and in `between` of all nodes. `judge` has their list."""
