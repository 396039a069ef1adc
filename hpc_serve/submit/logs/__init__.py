"""Which log files a replica has, and what they say over time."""
