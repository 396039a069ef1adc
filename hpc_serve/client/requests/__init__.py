"""One request and the replicas that it is sent to: where, whether again, and with which error it ends.

`exchange` decides, for threads and event loops alike; `attempt` is one request at one replica.
"""
