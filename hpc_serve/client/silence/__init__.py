"""Finds replicas that are lost or late while they have requests of this client.

`request_watch` is the thread that watches. `client/requests/` decides what becomes of the requests.
"""
