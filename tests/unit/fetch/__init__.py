"""What `hpc-serve fetch` brings into the cache, and what it says."""
