"""What a person asked for, checked."""
