"""Services: submitted, waited for, kept up, scaled, woken, stopped and forgotten."""
