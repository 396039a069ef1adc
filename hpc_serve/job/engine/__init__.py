"""The engine: its socket, certificate and process, when it is ready, whether it still answers, and how it drains."""
