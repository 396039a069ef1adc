"""The preflight: what can be known of a job's nodes before its engine is started, in seconds.

Each node gathers facts (`gather/`) and sends them to the head, which judges those of all nodes (`checks/`, `judge`).
"""
