"""What a site file may say, and which site files there are."""
