"""The node that a launcher runs on: its addresses and ports, memory, devices, cores and processes."""
