"""The text of a script."""
