"""The commands that use services: `chat`, `env`, `gateway`, `bench`."""
