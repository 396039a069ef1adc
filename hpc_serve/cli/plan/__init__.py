"""`plan`, `gpus`, `models`."""
