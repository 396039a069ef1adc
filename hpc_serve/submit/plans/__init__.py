"""The plan of a request, and what is looked at before the queue."""
