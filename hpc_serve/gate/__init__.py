"""Which requests reach a server, and what a connection may cost before it has shown the key."""
