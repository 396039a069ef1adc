"""The same rows, asked of other tools: hf-mem, kvfit and aiconfigurator, each as its own users ask it.

`python -m benchmarks.accuracy.other_tools` prints the table from what each tool said last
(data/other_tools.json). `… --ask TOOL=PYTHON` asks a tool anew, with the Python of an environment that has it
(envs/other-tools). `questions` says what a row is asked, `headers` what a checkpoint's files hold, `programs` run
beside the tools and import nothing of ours, `table` compares.
"""
