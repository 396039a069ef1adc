"""One run of a replica: its nodes, its parts, its record, and how it ended."""
