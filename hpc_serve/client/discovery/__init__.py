"""Finds the ready replicas of a service, waits for one, and wakes a service that is asleep.

`client/replicas/` decides how one replica is.
"""
