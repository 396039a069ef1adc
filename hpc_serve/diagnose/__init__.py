"""Reads the cause of a failure from logs: text in, findings out. No other place names the cause of a failure.

`rules` has the lines that mean a known cause, with its cure. `evidence` collects these and the exceptions that
processes raised from one log. `causes` chooses the first cause out of all logs. `submit/diagnosis.py` decides which
files are read; the launcher notes the lines of its children. Only the standard library is used.
"""
