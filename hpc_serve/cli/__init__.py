"""The command line: click and what is shown on the screen, no logic. One file per group of commands."""
