"""What went wrong, read from logs: text in, findings out. It is the only place that names the cause of a failure.

`lines` says what the beginning of a line tells, `tracebacks` which exception a process raised, `rules` which lines mean
a known cause and its cure, `evidence` collects both from one log, and `causes` chooses the first cause out of all logs.
Which files are read is decided by `submit/diagnosis.py`; the launcher notes the lines of its children as they come.
Only the standard library is used.
"""
