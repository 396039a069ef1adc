"""How a client knows that an engine is ours: the authority of a home, the certificate of each run, who trusts them."""
