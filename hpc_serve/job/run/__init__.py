"""One run of a replica: what its launchers are told, its parts and the order of their end, its record, its outcome."""
