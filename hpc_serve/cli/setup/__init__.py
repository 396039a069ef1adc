"""The commands that prepare services: `init`, `site`, `fetch`, `quantize`."""
