"""One request and the replicas that it is sent to."""
