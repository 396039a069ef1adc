"""A plan as a person or a program reads it: the arithmetic line by line, tables, JSON."""
