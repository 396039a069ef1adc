"""Programs that run with the Python of a tool: questions as JSON on standard input, answers as JSON on standard output.

They import the tool and the standard library alone. What a tool reads from the model hub they give it themselves, so
that nothing is asked of the network; the tool's own code does the rest. An answer is a tool's figures in our units, or
{"not_asked": why} where the tool has no such question, or {"refused": its words}.
"""
