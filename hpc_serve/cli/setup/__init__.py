"""`init`, `site`, `fetch`, `quantize`."""
