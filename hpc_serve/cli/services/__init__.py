"""The commands for services: `status`, `wait`, `top`, `logs`, `scale`, `wake`, `stop`, `forget`, `targets`."""
