"""How a stream that broke goes on at another replica. Pure: bytes and values in, bytes and values out.

`stream` says which streams may go on, and what one held when it broke; `relay` what is asked of another replica and how
its answer becomes the rest of the stream. The transport sends and receives.
"""
