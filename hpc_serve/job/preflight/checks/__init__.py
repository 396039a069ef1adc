"""The checks: each a pure function over facts. Those of `NODE_CHECKS` look at one node, those of `between` at all."""
