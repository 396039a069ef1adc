"""A request as a person made it, checked as far as possible without a cluster: options, replicas, bounds, chains."""
