"""The text of a batch script: a request and its plan in, a script a person can read and edit out. Pure.

It computes no layout and starts no process: the plan and the launcher do that. Templates are Jinja's, ours and a
site's; a site's template that everybody can change is refused. Every value that is printed is quoted for the shell.
Values of `#SBATCH` lines cannot be quoted; they were checked when the request was made. `render_program` makes the
script of a job that runs one program on one node (quantize.sh.j2, batch.sh.j2), `render_script` that of a service.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2
from jinja2.sandbox import SandboxedEnvironment
from markupsafe import Markup

import hpc_serve
from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.hardware import AcceleratorSpec
from hpc_serve.rendezvous.fields import log_dir_before_job
from hpc_serve.rendezvous.ownership import check_chosen
from hpc_serve.rendezvous.record import DEFAULT_MACHINE
from hpc_serve.submit.request.options import SlurmOptions, option_words
from hpc_serve.submit.request.request import OPTIONS, ServeRequest
from hpc_serve.submit.script.memory import asked_parts, has_whole_nodes, memory_sum
from hpc_serve.submit.slurm.slurm import array_options, batch_log_option
from hpc_serve.units import number_of
from hpc_serve.vllm.arguments import read_arguments
from hpc_serve.vllm.command import check_layout, choose_backend, read_command

if TYPE_CHECKING:
    from hpc_serve.plan import ServePlan


# -- templates

# With autoescape on, Jinja marks the output of blocks and macros as Markup. Here this mark means "checked" or "quoted".
_Checked = Markup


def _render_template(name: str, site_templates: str | None, context: Mapping[str, Any]) -> str:
    """Return the text of a template, of the site's folder if it has one of that name, else ours.

    Raises InvalidRequestError if it uses a value that is not there or is no template, or if everybody can change it.
    """
    try:
        return _environment(site_templates).get_template(name).render(context)
    except (jinja2.TemplateError, OSError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"template {name} cannot be rendered: {error}") from error


def _comment(text: str) -> Markup:
    """`text` as it may stand behind a `#`: on one line, without control characters."""
    return _Checked("".join(character if character.isprintable() else "?" for character in text))


class _SiteLoader(jinja2.FileSystemLoader):
    """Opens a site's templates, those too that others include, extend or import."""

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        source, path, is_unchanged = super().get_source(environment, template)
        check_chosen(Path(path), called=f"the template {path}")
        return source, path, is_unchanged


def _environment(site_templates: str | None) -> jinja2.Environment:
    ours = jinja2.PackageLoader("hpc_serve.templates", "")
    folders = [_SiteLoader(site_templates)] if site_templates else []
    ours_by_name = jinja2.PrefixLoader({"hpc-serve": ours})  # for a template of the site that has the name of ours
    environment = SandboxedEnvironment(
        loader=jinja2.ChoiceLoader([*folders, ours, ours_by_name]),
        undefined=jinja2.StrictUndefined,
        finalize=_shell_word,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
    )
    environment.filters["both_sides"] = lambda bind: bind if ":" in bind else f"{bind}:{bind}"
    environment.filters["on_one_line"] = lambda text: Markup(
        " ".join(line.strip() for line in text.split("\n") if line.strip())
    )
    environment.filters["words"] = lambda words: Markup(" ".join(_quote(str(word)) for word in words))
    return environment


def _shell_word(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(_quote(str(value)))


def _quote(word: str) -> str:
    """`word` quoted for bash, on one line, so that a template may indent what holds it."""
    if "\n" not in word:
        return shlex.quote(word)
    return "$'" + word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


# -- the script of one program


def render_program(
    template: str,
    *,
    title: str,
    directives: Sequence[str],
    modules: Sequence[str],
    exports: Mapping[str, str],
    templates_dir: str | None,
    umask: int = 0o077,
    **further: Any,
) -> str:
    """Return the text of a script. Without `directives` it runs on this machine. Raises InvalidRequestError."""
    context = {
        "title": _comment(title),
        "version": _Checked(hpc_serve.__version__),
        "is_slurm": bool(directives),
        "directives": list(map(_Checked, directives)),
        "modules": modules,
        "exports": {_Checked(name): value for name, value in exports.items()},
        "umask": _Checked(f"{umask:03o}"),
    }
    return _render_template(template, templates_dir, {**context, **further})


def program_directives(
    slurm: SlurmOptions, *, job_name: str, log_dir: str, gpus: int = 0, further: Sequence[str] = ()
) -> list[str]:
    """Return the words of the `#SBATCH` lines, for one node. sbatch's own words (`slurm.extra`) come last, and win."""
    return [
        f"--job-name={job_name}",
        *slurm.lines("where"),
        "--nodes=1",
        "--ntasks-per-node=1",
        *([slurm.gpu_line(gpus)] if gpus else []),
        *slurm.lines("share"),
        batch_log_option(log_dir, is_array=any(word.startswith(("--array", "-a")) for word in slurm.extra)),
        *(["--exclusive"] if slurm.exclusive else []),
        *further,
        *slurm.extra,
    ]


# -- the script of a service

_CPUS_PER_GPU = 4  # one engine worker, its threads for loading and tokenising
_NOTICE_S = 120  # of a preemption, where the time limit gives none
_MOST_RERUNS = 5  # with --requeue
_WAY_DOWN_S = 20  # from the last answer to the end of the job


def render_script(request: ServeRequest, plan: ServePlan) -> str:
    """Return the script that serves `plan` as `request` asks, for `sbatch` or (cluster "local") for bash.

    Raises InvalidRequestError if there are no scripts for the accelerator, or a site's template uses a value that is
    not there, and DoesNotFitError if the engine could not start so on the job's nodes.
    """
    text = _render_template(f"{request.cluster}.sh.j2", request.templates_dir, _context(request, plan))
    # The head checks its visible line in the same way.
    command, nodes = read_command(["vllm", "serve", plan.model, *plan.vllm_args]), plan.layout.num_nodes
    backend = choose_backend(request.backend, command, nodes)
    device: Literal["TPU", "GPU"] = "TPU" if plan.accelerator.kind == "tpu" else "GPU"
    check_layout(command, num_nodes=nodes, device=device, per_node=devices_per_node(plan), backend=backend)
    return text


def _context(request: ServeRequest, plan: ServePlan) -> dict[str, Any]:
    device = plan.accelerator
    if device.no_script_reason:
        raise InvalidRequestError(
            f"hpc-serve plans for {device.product}, but has no script for it: {device.no_script_reason}."
        )
    memory = asked_parts(request, plan)
    return {
        "title": _comment(_title(request, plan)),
        "not_run": _comment(_not_run(device)),
        "version": _Checked(hpc_serve.__version__),
        "memory_sum": _comment(memory_sum(memory)),
        "environment": request.environment,
        "modules": request.environment.modules,
        "exports": {_Checked(name): value for name, value in _exports(request).items()},
        "device": device,
        "service": request.service,
        **_replicas(request.replicas_per_job),
        "drain_s": (request.slurm.notice_s or _NOTICE_S) - _WAY_DOWN_S,
        "keeper_options": _keeper_options(request, plan),
        "most_reruns": _MOST_RERUNS if request.slurm.requeue else 0,
        "backend": request.backend,
        "engine_restarts": request.engine_restarts,
        "preflight_only": request.preflight_only,
        "devices": ["--tpus-per-node" if device.kind == "tpu" else "--gpus-per-node", devices_per_node(plan)],
        "model": plan.model,
        "served_model_names": tuple(dict.fromkeys((*plan.served_model_names, request.service))),
        "rendered_by": _comment(shlex.join(render_argv(request))),
        "directives": [_Checked(line) for line in _directives(request, plan, sum(memory.values()))],
        "engine_options": [option.words for option in read_arguments(plan.vllm_args)],
    }


def _replicas(per_job: int) -> dict[str, Any]:
    """Return the words that tell the replicas of one job apart; `$replica` is the number of a shell's replica."""
    several = per_job > 1
    return {
        "replicas_per_job": per_job,
        "indices": _Checked(" ".join(map(str, range(per_job)))),
        "which_replica": _Checked(f' --replica "$replica/{per_job}"' if several else ""),
        "of_replica": _Checked(" of replica $replica" if several else ""),
        "own_replica": _Checked(' --replica "$replica"' if several else ""),
        "run_log": _Checked("$HPC_SERVE_JOB_ID-$replica" if several else "$HPC_SERVE_JOB_ID"),
    }


def _keeper_options(request: ServeRequest, plan: ServePlan) -> list[object]:
    """Return the options of the program beside the launcher; empty if none is needed."""
    words: list[object] = ["--keep-up", "--notice-s", request.slurm.notice_s or 0] if request.keep_up else []
    if request.is_elastic:
        least = replicas_of(request, plan)
        words += ["--replicas", f"{least}:{request.max_replicas or least}"]
    if request.idle_stop_s is not None:
        words += ["--idle-stop-s", f"{request.idle_stop_s:.15g}"]
    return words


def replicas_of(request: ServeRequest, plan: ServePlan) -> int:
    """Return the number of replicas in all jobs: as asked for, else those of one job, or as many as the plan takes."""
    if request.replicas or request.replicas_per_job > 1:
        return request.replicas or request.replicas_per_job
    return plan.replicas if request.cluster == "slurm" else 1


def devices_per_node(plan: ServePlan) -> int:
    """GPUs, or chips, of each node that the ranks of one engine take; 0 where they run on CPUs."""
    return 0 if plan.accelerator.kind == "cpu" else plan.layout.gpus_per_node


def _not_run(device: AcceleratorSpec) -> str:
    """Return a remark for accelerators on which no script was ever run; empty for the others."""
    if device.is_script_tested:
        return ""
    return f"Rendered, not run here: the tests of hpc-serve have no {device.vendor} {device.unit}. Reports are welcome."


def _directives(request: ServeRequest, plan: ServePlan, memory_gib: int) -> list[str]:
    """Return the words of the `#SBATCH` lines, in a fixed order. Their values were checked when the request was made.

    `memory_gib` is what the job takes of each node. 0: all there is.

    Raises InvalidRequestError for a share of a CPU node without a number of cores.
    """
    slurm, layout = request.slurm, plan.layout
    # Each job of a chain is submitted by itself.
    jobs = 1 if request.chain > 1 else -(-replicas_of(request, plan) // request.replicas_per_job)
    gpus = layout.gpus_per_node * request.replicas_per_job
    whole_nodes = has_whole_nodes(request, plan)
    if plan.accelerator.kind == "cpu" and not (whole_nodes or slurm.cpus_per_task):
        raise InvalidRequestError(
            "A share of a CPU node needs a number of cores: add --cpus-per-task, or leave out --no-exclusive."
        )
    completed = replace(
        slurm,
        cpus_per_task=slurm.cpus_per_task or (None if whole_nodes else _CPUS_PER_GPU * gpus),
        mem=slurm.mem or ("0" if whole_nodes else f"{memory_gib}G"),
    )
    return [
        f"--job-name={slurm.job_name or f'hpc-serve-{request.service}'}",
        *completed.lines("where"),
        f"--nodes={layout.num_nodes}",
        "--ntasks-per-node=1",
        *([slurm.gpu_line(gpus)] if plan.accelerator.kind == "gpu" else []),
        *completed.lines("share"),
        *(array_options(jobs) if jobs > 1 else []),
        batch_log_option(request.log_dir and log_dir_before_job(request.log_dir), is_array=jobs > 1),
        *(["--exclusive"] if whole_nodes else []),
        *([] if slurm.requeue is None else ["--requeue" if slurm.requeue else "--no-requeue"]),
        "--open-mode=append",
        *slurm.extra,
    ]


def _exports(request: ServeRequest) -> dict[str, str]:
    log_dir = {"HPC_SERVE_LOG_DIR": request.log_dir} if request.log_dir else {}
    offline = {"HF_HUB_OFFLINE": "1"} if request.offline_nodes else {}
    return {**request.env, **request.settings.exports(), **log_dir, **offline}


def render_argv(request: ServeRequest) -> tuple[str, ...]:
    """Return the `hpc-serve render` command that gives this script again, with the same site file and environment."""
    values = {one.name: getattr(request, one.name) for one in OPTIONS}
    values["service"] = request.service if request.service != request.model else None
    values["replicas"] = _asked_replicas(request)
    given = {one.name: option_words(one, values[one.name]) for one in OPTIONS}
    if request.settings.stage is not None:
        given["tools"].append("--no-stage" if request.settings.stage == "off" else "--stage")
    words = [word for some in given.values() for word in some]
    words += request.slurm.option_words()
    words += [word for name, value in request.env.items() for word in ("--env", f"{name}={value}")]
    engine_args = ("--", *request.engine_args) if request.engine_args else ()
    return ("hpc-serve", "render", "--model", request.model, *words, *engine_args)


def _asked_replicas(request: ServeRequest) -> str | int | None:
    if request.machine != DEFAULT_MACHINE:
        return f"{request.machine}:{request.replicas or 1}"
    if request.max_replicas is None:
        return request.replicas
    return f"{request.replicas or 1}:{request.max_replicas}"


def _title(request: ServeRequest, plan: ServePlan) -> str:
    layout = plan.layout
    units = number_of(layout.gpus_per_node, plan.accelerator.unit)
    where = f"{number_of(layout.num_nodes, 'node')} x {units} ({request.gpu})"
    sizes = layout.sizes(" x ")
    replicas = replicas_of(request, plan)
    each = f"{replicas} replicas, each on " if replicas > 1 else ""
    if request.replicas_per_job > 1:
        each += f"1/{request.replicas_per_job} of "
        gpus = f" x {layout.gpus_per_node * request.replicas_per_job} GPUs" if plan.accelerator.kind == "gpu" else ""
        where = f"1 node{gpus} ({request.gpu})"
    return f'{plan.model} as "{request.service}": {each}{where}, {sizes}'
