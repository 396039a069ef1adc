"""The pictures that `plan --plot` draws: speed over requests in flight, and memory by share. Needs matplotlib."""
