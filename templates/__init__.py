"""Jinja templates of the scripts; `submit/script/render.py` fills them, a site's own folder may override blocks."""
