"""How fast a layout serves: ideally, and as expected of a real engine."""
