"""The connections between the launchers of a run."""
