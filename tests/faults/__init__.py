"""What a service's users get while its parts break: `python -m tests.faults`, or `make faults`.

`load` is a user's program that keeps requests in flight and checks every answer. A `fault` breaks one thing of a
running service (`service`: on this machine; `slurm_service`: on the test cluster); the `catalogue` has all of them.
`outcomes` counts what became of the requests, `expected` says what today's product may lose, `run` joins them.
"""
