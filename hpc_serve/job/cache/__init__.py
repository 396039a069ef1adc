"""What the engine compiles, and where it is kept for the next start."""
