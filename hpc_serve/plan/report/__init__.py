"""A plan for people and programs: the arithmetic line by line, text, JSON."""
