"""`doctor`, `report`."""
