"""The choice of a layout: the candidates, which of them fit, the best one, and what would help if none fits."""
