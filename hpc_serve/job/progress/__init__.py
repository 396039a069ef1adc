"""How far a start is, and how long it takes until the replica is ready."""
