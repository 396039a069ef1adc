"""`chat`, `env`, `gateway`, `bench`."""
