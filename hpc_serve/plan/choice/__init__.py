"""Which layout: what can be laid on the machines, what fits, which is chosen, and what would help where none fits."""
