"""hpc-serve: large language models as named services on a SLURM cluster.

Planning (`hpc_serve.plan`) decides what fits where; submission (`hpc_serve.submit`) turns a plan into a job;
the job (`hpc_serve.job`) starts Ray and the engine and publishes where they are (`hpc_serve.rendezvous`);
the client (`hpc_serve.client`) finds them. Nothing is imported here, so that every command starts quickly.
"""

__version__ = "0.1.0"
