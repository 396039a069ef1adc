"""Printed samples of the documents, and the recording: made by programs that run the commands (CONTRIBUTING.md)."""
