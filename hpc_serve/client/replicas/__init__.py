"""The replicas that a client knows: the state of each, and the choice of one for a request.

`fork`, `event_loops` and `sdk` are shared by all of the client: processes, event loops, the HTTP library.
"""
