"""The preflight: what can be known of a job's nodes before its engine is started, in seconds.

Each node gathers facts (`node_side`) and sends them to the head (`head_side`), which judges those of all nodes
(`checks`, `judge`).
"""
