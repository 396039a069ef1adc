"""The replicas that a client knows: how each is, and which one a request goes to."""
