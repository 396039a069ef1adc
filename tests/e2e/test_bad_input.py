"""What cannot work, asked of the real command on a real Slurm: one clear error, its exit code, nothing submitted.

Each case also holds that nothing was lost: no job in the queue, no name claimed, no script or key in the wrong place.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.jobs import User

pytestmark = [pytest.mark.slurm]

SUBMIT = ("submit", "--model", "8b")
SMALL = ("--mem", "1G", "--cpus-per-task", "1")


@pytest.fixture(scope="module")
def alice(cluster, alice_env):
    return User(cluster, alice_env)


@pytest.fixture
def home(alice, tmp_path_factory):
    """A HPC_SERVE_HOME of alice's own for one test."""
    made = alice.run("mktemp", "--directory", f"{alice.home}/home-XXXXXX")
    assert made.returncode == 0, made.stderr
    path = Path(made.stdout.strip())
    yield path
    shutil.rmtree(path)


def submitted_jobs(alice: User) -> str:
    return alice.run("squeue", "--me", "--noheader", "--format=%i").stdout


def refused(alice: User, home: Path, *words: str, exit_code: int, env=None) -> str:
    """The error of a command that must fail and leave nothing behind."""
    before = submitted_jobs(alice)
    done = alice.hpc_serve(*words, env={"HPC_SERVE_HOME": str(home), **(env or {})})
    assert (done.returncode, done.stdout) == (exit_code, "false\n" if words[0] == "env" else ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert submitted_jobs(alice) == before
    left = {path.name for path in home.rglob("*") if path.is_file() and path.suffix != ".forgotten"}
    assert left <= {"api_key"}, "a refused request leaves at most the key of its service"
    return done.stderr


@pytest.mark.parametrize(
    ("words", "exit_code", "told"),
    [
        (("submit", "--model", "405bb"), 2, ["405bb", "Did you mean 405b"]),
        (
            ("submit", "--model", "70b", "--tensor-parallel-size", "7", "--nodes", "1"),
            3,
            ["tensor parallel size (7)", "are possible"],
        ),
        (("submit", "--model", "405b", "--nodes", "1"), 3, ["does not fit"]),
        ((*SUBMIT, "--nodes", "0"), 2, ["nodes is 0", "at least 1"]),
        ((*SUBMIT, "--job-name", "a\n#SBATCH --exclusive"), 2, ["job-name", "newlines"]),
        ((*SUBMIT, "--job-name", "it's"), 2, ["job-name", "quotes"]),
        ((*SUBMIT, "--name", "../x"), 2, ["'../x' cannot name a service"]),
        ((*SUBMIT, *SMALL, "--partition", "nope"), 4, ["invalid partition specified: nope", "Partitions here: gpu"]),
        ((*SUBMIT, *SMALL, "--constraint", "infiniband"), 4, ["Invalid feature specification"]),
        ((*SUBMIT, "--mem", "9T"), 4, ["Requested node configuration is not available", "gpu:h100:8"]),
        (("submit", "405b", "--nodes", "4"), 4, ["gpu: 3 nodes with gpu:h100:8"]),
        ((*SUBMIT, *SMALL, "--time", "30-0"), 4, ["--time=30-00:00:00", "gpu 7-00:00:00", "so it was cancelled"]),
        ((*SUBMIT, *SMALL, "--sbatch", "--no-such-option"), 4, ["unrecognized option '--no-such-option'"]),
        ((*SUBMIT, "--log-dir", "/proc/logs"), 5, ["/proc/logs", "--log-dir"]),
        (("wait", "nonesuch"), 5, ["No service or job 'nonesuch'"]),
        (("stop", "nonesuch"), 5, ["No service or job 'nonesuch'"]),
        (("env", "nonesuch"), 5, ["nonesuch"]),
    ],
)
def test_a_request_that_cannot_be(alice, home, words, exit_code, told):
    error = refused(alice, home, *words, exit_code=exit_code)
    for word in told:
        assert word in error


def test_weights_that_are_missing(alice, home):
    error = refused(alice, home, *SUBMIT, exit_code=2, env={"HPC_SERVE_MODEL": "/scratch/nowhere"})
    assert "HPC_SERVE_MODEL=/scratch/nowhere is not a folder" in error


def test_an_environment_that_is_missing(alice, home):
    error = refused(alice, home, *SUBMIT, exit_code=2, env={"HPC_SERVE_ENV": "/nowhere"})
    assert "no Python environment in /nowhere" in error


def test_an_unknown_setting_in_the_site_file(alice, home):
    site = alice.write("site.yaml", "partition: gpu\nconstrain: h100\n")
    error = refused(alice, home, *SUBMIT, exit_code=2, env={"HPC_SERVE_SITE": str(site)})
    assert "site.yaml:2: unknown setting 'constrain'. Did you mean constraint?" in error


def test_sbatch_is_missing(alice, home):
    path = alice.environ["PATH"].partition(":")[0]
    error = refused(alice, home, *SUBMIT, exit_code=4, env={"PATH": path})
    assert "no `sbatch` here" in error
    assert "--cluster local" in error


def test_the_controller_is_down(alice, home):
    alice.cluster.stop_controller()
    try:
        done = alice.hpc_serve(*SUBMIT, *SMALL, env={"HPC_SERVE_HOME": str(home)})
    finally:
        alice.cluster.start_controller()
    assert (done.returncode, done.stdout) == (4, "")
    assert "controller does not answer" in done.stderr
    assert "Nothing was submitted" in done.stderr
    assert submitted_jobs(alice) == ""
    assert not [path for path in home.rglob("*") if path.is_file() and path.name != "api_key"]


def test_a_home_that_cannot_be_written_to(alice, home):
    home.chmod(0o500)
    error = refused(alice, home, *SUBMIT, exit_code=5)
    assert "Permission denied" in error
    assert "HPC_SERVE_HOME" in error
    home.chmod(0o700)


def test_a_home_of_somebody_else(alice, home):
    elsewhere = alice.cluster.home("mallory")
    elsewhere.chmod(0o777)
    try:
        error = refused(alice, home, *SUBMIT, exit_code=5, env={"HPC_SERVE_HOME": str(elsewhere)})
    finally:
        elsewhere.chmod(0o700)
    assert "belongs to user" in error


class TestRecordsThatCannotBeTrusted:
    @pytest.fixture
    def service(self, alice, home):
        """A service with one job in the queue, to which no damage must be done."""
        env = {"HPC_SERVE_HOME": str(home)}
        words = (*SUBMIT, *SMALL, "--sbatch", "--hold", "--json")
        submitted = json.loads(alice.hpc_serve(*words, env=env).stdout)
        yield submitted, home / "services" / "8b"
        alice.run("scancel", submitted["job_id"])

    @pytest.mark.parametrize(
        ("text", "owner", "why"),
        [
            ('{"version": 1, "service": "8', "alice", "not"),
            ("", "alice", "not"),
            ('{"version": 1}', "alice", "service"),
            ('{"version": 1, "service": "8b", "state": "ready", "hosts": ["10.0.0.66"]}', "mallory", "belongs to user"),
        ],
        ids=["half-written", "empty", "other", "foreign"],
    )
    def test_a_bad_record_is_told_and_hides_nothing_else(self, alice, service, text, owner, why):
        submitted, folder = service
        record = folder / f"{submitted['job_id']}-r0-0.json"
        record.write_text(text)
        user = alice.cluster.user_id(owner)
        alice.cluster.run(["chown", str(user), str(record)], user="root")
        env = {"HPC_SERVE_HOME": str(folder.parents[1])}
        done = alice.hpc_serve("status", "--json", env=env)
        report = json.loads(done.stdout)
        states = {status["job_id"]: status["state"] for status in report["services"]}
        assert states[submitted["job_id"]] == "pending"
        assert record.name in report["problems"][0]
        assert why in report["problems"][0]
        for words, exit_code, printed in (
            (("env", "8b"), 5, "false\n"),
            (("chat", "8b", "hello"), 5, ""),
            (("wait", "8b", "--timeout", "0"), 7, ""),
        ):
            done = alice.hpc_serve(*words, env=env)
            assert (done.returncode, done.stdout) == (exit_code, printed)
            assert "Traceback" not in done.stderr
        assert record.read_text() == text
        assert alice.is_queued(submitted["job_id"])
