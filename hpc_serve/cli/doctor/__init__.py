"""The commands `doctor` and `report`. `diagnose/` decides the cause of a failure."""
