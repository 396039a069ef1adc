"""The pictures of `plan --plot`: latency against throughput, the time of a step, memory. Needs matplotlib."""
