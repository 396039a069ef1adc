"""`status`, `wait`, `top`, `scale`, `wake`, `stop`, `forget`, `targets`, `logs`."""
