"""Measures a service as its clients meet it: requests of a known shape, at a known pace.

What is asked (`prompts`, `files`), when (`arrivals`) and what follows from the answers (`answers`, `figures`, `notes`,
`results`, `report`, `page`) is pure. `texts` asks the engines for tokens, `load` sends the requests, `own_share`
watches this program, `sweep` makes one run after the other.
"""
