"""One address for every service of a home: an HTTP server that speaks to OpenAI clients of any language.

`app` answers requests, `server` runs it. Each request goes through the client's own transport (`hpc_serve.client`),
which chooses the replica, repeats what was lost and continues broken streams; nothing of that is done here. Needs the
extra `gateway`.
"""
