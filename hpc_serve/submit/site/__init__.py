"""Reads site files: their settings, the site's own models, and which of several files wins."""
