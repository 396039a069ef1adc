"""The engine: its process, its endpoint, when it is ready, whether it still answers, and how it drains."""
