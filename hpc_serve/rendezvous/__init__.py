"""The files in the home that say where a service is, and who may use its name.

Readers find out for themselves whether a file is still true.
"""
