"""Has the plan of a request made, and checks files and weights before a job is queued."""
