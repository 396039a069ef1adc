"""Where a model's config, files and weights are, here and on the hub."""
