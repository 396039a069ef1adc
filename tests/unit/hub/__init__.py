"""Finding a model's config, files and weights; what `hpc-serve fetch` brings into the cache, and what it says."""
