"""From a request to a job: what was asked for, the script that serves it, and the scheduler that runs it."""
