"""What a node is: its network, its memory, its devices, its processes."""
