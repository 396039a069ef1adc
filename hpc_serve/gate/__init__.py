"""The gate before an engine or a gateway: who may ask, and what a connection may cost before it shows the key.

`engine_gate` is the one module that vLLM imports. It also has the engine serve on its launcher's socket.
"""
