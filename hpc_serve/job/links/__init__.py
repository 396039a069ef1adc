"""The connections between the launchers of a run: who may make one, its messages, and when it counts as lost."""
