"""The commands of the documents, as a user types them on the login host, with real Slurm, Ray and vLLM.

A scaled-down model stands in for the weights (HPC_SERVE_MODEL). Three starts: 16 ranks by `submit`, one node by `mp`
beside it, and the demo, which needs no Slurm.
"""

from __future__ import annotations

import json
import re
import signal
import sys

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import BUSY, User

pytestmark = [pytest.mark.slurm, pytest.mark.engine]

START_S = 900.0


@pytest.fixture(scope="module")
def alice(cluster, alice_env, tiny_models):
    user = User(cluster, {**alice_env, **BUSY, "HPC_SERVE_MODEL": str(tiny_models / "405b")})
    yield user
    user.run("scancel", "--user", "alice")


@pytest.fixture(scope="class")
def submitted(alice):
    done = alice.hpc_serve("submit", "--model", "405b", "--nodes", "2", "--wait", timeout=START_S)
    yield done
    alice.hpc_serve("stop", "405b")


class TestSubmitOnTwoNodes:
    def test_it_follows_the_stages_until_the_service_is_ready(self, alice, submitted):
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        said = submitted.stdout + submitted.stderr
        for stage in ("waiting for Ray nodes", "starting the engine", "405b is ready at"):
            assert stage in said

    def test_status_says_where_it_is_with_predicted_and_measured_figures(self, alice, submitted):
        (status,) = json.loads(alice.hpc_serve("status", "405b", "--json").stdout)["services"]
        assert (status["state"], status["tensor_parallel_size"], status["pipeline_parallel_size"]) == ("ready", 8, 2)
        assert status["predicted"]["kv_cache_tokens"] > 0
        assert status["measured"]["kv_cache_tokens"] > 0
        shown = alice.hpc_serve("status", "405b").stdout
        assert "ready" in shown
        assert status["address"] in shown

    def test_chat_answers(self, alice, submitted):
        done = alice.hpc_serve("chat", "405b", "Hello")
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()

    def test_env_lets_any_other_tool_in(self, alice, submitted):
        code = "import openai; print([model.id for model in openai.OpenAI().models.list()])"
        done = alice.run("bash", "-c", f"eval \"$(hpc-serve env 405b)\" && python -c '{code}'")
        assert done.returncode == 0, done.stderr
        assert "meta-llama/Llama-3.1-405B-Instruct" in done.stdout

    def test_env_is_enough_for_programs_that_know_nothing_of_hpc_serve(self, alice, submitted):
        """curl, and an OpenAI client in a Python that finds the SDK alone, on another host than the login host."""
        exported = alice.hpc_serve("env", "405b").stdout
        curl = (
            'printf \'header = "Authorization: Bearer %s"\' "$OPENAI_API_KEY" | '
            'curl --silent --show-error --noproxy "*" --config - "$OPENAI_BASE_URL/models"'
        )
        code = (
            "import sys; sys.modules['hpc_serve'] = None\n"
            "import openai; print([model.id for model in openai.OpenAI().models.list()])"
        )
        for command in (curl, f'{sys.executable} -c "{code}"'):
            done = alice.run("bash", "-c", f"{exported}\n{command}", node="n3")
            assert done.returncode == 0, done.stderr
            assert "meta-llama/Llama-3.1-405B-Instruct" in done.stdout
            without = alice.run(
                "bash", "-c", f"{exported}\nunset SSL_CERT_FILE CURL_CA_BUNDLE REQUESTS_CA_BUNDLE\n{command}", node="n3"
            )
            assert without.returncode != 0, "trusted without our authority"

    def test_wait_and_logs(self, alice, submitted):
        assert alice.hpc_serve("wait", "405b").returncode == 0
        logs = alice.hpc_serve("logs", "405b").stdout
        assert "is ready at" in logs

    def test_stop_leaves_nothing_and_says_so(self, alice, submitted):
        done = alice.hpc_serve("stop", "405b")
        assert done.returncode == 0, done.stderr
        wait_for(lambda: not alice.processes(), 180, what="no process left")
        (status,) = json.loads(alice.hpc_serve("status", "405b", "--json").stdout)["services"]
        assert status["state"] == "stopped"
        assert alice.hpc_serve("chat", "405b", "Hello").returncode == 5


class TestOneNode:
    """Four commands in a home of its own, as somebody's who has read nothing: init, submit --wait, chat, stop."""

    def test_from_init_to_an_answer_in_four_commands_and_ctrl_c_only_detaches(self, alice, tiny_models):
        held = alice.write("held", "")  # the job runs, and nothing is ready, while this is there
        environment = alice.home / "held-env" / "bin"
        environment.mkdir(parents=True)
        (environment / "activate").write_text(
            f"while [[ -e {held} ]]; do sleep 0.2; done\nsource {sys.prefix}/bin/activate\n"
        )
        home = alice.home / "newcomer"
        made = alice.run("mkdir", "--mode=0700", str(home))
        assert made.returncode == 0, made.stderr
        small = {**alice.environ, "HPC_SERVE_MODEL": str(tiny_models / "70b"), "PYTHONUNBUFFERED": "1"}
        small |= {"HOME": str(home), "HPC_SERVE_ENV": str(environment.parent)}
        newcomer = User(alice.cluster, small)
        assert "Next:  hpc-serve submit" in newcomer.hpc_serve_said("init")
        site = json.loads(newcomer.hpc_serve_said("site", "--json"))
        assert site["files"] == [str(home / ".config" / "hpc-serve" / "site.yaml")]
        settings = {name: one["value"] for name, one in site["settings"].items()}
        assert (settings["partition"], settings["gpu"], settings["gpus_per_node"]) == ("gpu", "h100-80gb", 8)

        watching = alice.cluster.popen(
            ["hpc-serve", "submit", "70b", "--wait", "--backend", "mp", "--mem", "8G"], user="alice", env=small
        )
        # Its first stage is told once it watches; before, Ctrl-C ends the submission itself.
        seen = [watching.stdout.readline()]
        while seen[-1] and not re.match(r"\S+ +70b ", seen[-1].lstrip()):
            seen.append(watching.stdout.readline())
        assert seen[-1], seen
        wait_for(lambda: alice.run("squeue", "--noheader", "--states=RUNNING").stdout.strip(), 180, what="the job")
        watching.send_signal(signal.SIGINT)
        said = "".join(str(text) for text in watching.communicate(timeout=180))
        assert watching.returncode == 130
        assert "hpc-serve wait 70b" in said
        held.unlink()
        done = newcomer.hpc_serve("wait", "70b", timeout=START_S)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not [process for process in alice.processes() if "raylet" in process.argv[0]]
        answer = newcomer.hpc_serve("chat", "70b", "Why is the sky blue?")
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.strip()
        assert newcomer.hpc_serve("chat", input="Hello").returncode == 0  # the only live service needs no name
        assert newcomer.hpc_serve("stop", "70b").returncode == 0
        wait_for(lambda: not alice.processes(), 180, what="no process left")

    def test_the_demo_serves_asks_and_stops_without_slurm(self, alice):
        environ = {name: value for name, value in alice.environ.items() if name != "HPC_SERVE_MODEL"}
        done = User(alice.cluster, environ).hpc_serve("demo", timeout=START_S)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "gibberish" in done.stdout
        assert "curl" in done.stdout
        wait_for(lambda: not alice.cluster.processes("alice"), 180, what="no process left")
