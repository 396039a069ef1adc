"""Writes the text of a batch script from a request and its plan. `submit/services/` decides whether it is submitted."""
