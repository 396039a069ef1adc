"""The replicas that a client knows: the state of each, and the choice of one for a request.

`event_loops` and `sdk` are shared by all of the client: how it waits and what a fork changes, and the HTTP library.
"""
