"""The command line: click, and everything that is shown on the screen. It decides nothing.

`main` names the commands; the rooms below have one file for each group of them. `plan/`, `submit/` and `client/` decide
what a command does.
"""
