"""Turns a request into a job: the request, the script that serves it, and the scheduler that runs it.

    from hpc_serve.submit import ServeRequest, plan_service, submit

    request = ServeRequest(model="8b", service="8b")
    print(plan_service(request).layout)              # asks no scheduler
    print(submit(request).job_id)                    # hands the job to Slurm

`hpc-serve submit` calls the same functions, with the settings of the site files. These calls read no site file.
"""

from typing import TYPE_CHECKING

from hpc_serve.lazy import lazy_names

if TYPE_CHECKING:
    from hpc_serve.submit.plans.planning import plan_service
    from hpc_serve.submit.request.options import Environment, JobSettings, SlurmOptions
    from hpc_serve.submit.request.request import ServeRequest
    from hpc_serve.submit.services.services import Submission, submit

__all__ = ["Environment", "JobSettings", "ServeRequest", "SlurmOptions", "Submission", "plan_service", "submit"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "plan_service": "plans.planning",
            **dict.fromkeys(("Environment", "JobSettings"), "request.options"),
            "ServeRequest": "request.request",
            "SlurmOptions": "request.options",
            **dict.fromkeys(("Submission", "submit"), "services.services"),
        },
    )
