"""Pages of HTML that need nothing else: their frame, tables and charts. Pure; what they say is decided elsewhere."""
