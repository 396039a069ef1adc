"""What went wrong, read from logs: text in, findings out. It is the only place that names the cause of a failure.

`lines` says what the beginning of a line tells, `tracebacks` which exception a process raised, `rules` which lines mean
a known cause and its cure, `evidence` collects both from one log, and `causes` chooses the first cause out of all logs.
`submit/diagnosis/diagnosis.py` decides which files are read; the launcher notes the lines of its children.
Only the standard library is used.
"""
