"""Jinja templates of the scripts; `hpc_serve.submit.render` fills them, a site's own folder may override blocks."""
