"""A service on several kinds of machine: the site file, the scripts, one wanted state; against stand-ins for Slurm."""

from __future__ import annotations

import json

import pytest

from hpc_serve.errors import HpcServeError, InvalidRequestError, SiteFileError
from hpc_serve.rendezvous.claims import read_wanted, wanted_file
from hpc_serve.submit.services.want import scale, set_bounds, wake, want_stop_of
from hpc_serve.submit.site.site_files import read_site
from hpc_serve.submit.status.status_reader import find, read_status
from tests.unit.submit.service_8b import before_sbatch

SITE = """
gpu: h100-80gb
gpu_memory: 79GiB
gpus_per_node: 4
partition: hopper
time: 04:00:00
env: {HF_HOME: /hf}
machines:
  a100: {gpu: a100-80gb, partition: ampere, env: {NCCL_DEBUG: WARN}}
  l40s:
    gpu: l40s
    partition: ada
    gpus_per_node: 8
    time:
"""


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch):
    path = tmp_path / "site.yaml"
    path.write_text(SITE)
    monkeypatch.setenv("HPC_SERVE_SITE", str(path))
    monkeypatch.setenv("HPC_SERVE_SYSTEM_SITE", "")
    return path


def read(site, system=""):
    return read_site({"HPC_SERVE_SITE": str(site), "HPC_SERVE_SYSTEM_SITE": str(system)})


@pytest.fixture
def submit(store, slurm, ran):
    """Runs `submit` for the service s, which must end with this exit code; returns what it printed."""

    def submit_it(*words, code=0):
        return ran(["submit", "8b", "--name", "s", *words], code)

    return submit_it


def wanted(store):
    return read_wanted(store, "s")


def jobs(store):
    """The kinds of machine of the jobs that are there."""
    return {status.job_id: status.machine for status in read_status(store, "s").replicas if not status.is_over}


def stop_all(store, slurm):
    """Jobs 101 and 102 are stopped by a person, and have ended."""
    want_stop_of(store, find(store, "s"))
    for job_id in ("101", "102"):
        slurm.job(job_id, "CANCELLED", nodes="")


def refuse_ampere(slurm):
    refuses = 'if grep -q partition=ampere "$script"; then echo "sbatch: error: no" >&2; exit 1; fi'
    before_sbatch(slurm, f"for script; do :; done\n{refuses}")


class TestSite:
    def test_a_machine_has_its_own_settings_then_the_sites_but_not_its_gpu(self, site):
        own = read(site).of_machine("a100")
        assert (own.gpu, own.partition, own.time) == ("a100-80gb", "ampere", "04:00:00")
        assert (own.gpus_per_node, own.gpu_memory) == (None, None)
        assert own.env == {"HF_HOME": "/hf", "NCCL_DEBUG": "WARN"}
        emptied = read(site).of_machine("l40s")
        assert (emptied.time, emptied.gpus_per_node) == (None, 8)

    def test_an_image_of_a_machine_replaces_the_sites_environment(self, site):
        site.write_text("venv: /env\nmachines: {amd: {gpu: mi300x, apptainer: /rocm.sif}}\n")
        environment = read(site).of_machine("amd").environment({})
        assert (environment.kind, environment.path) == ("apptainer", "/rocm.sif")

    def test_an_empty_setting_takes_the_systems_machines_away(self, site, tmp_path):
        system = tmp_path / "system.yaml"
        system.write_text("machines: {old: {gpu: v100}}\n")
        site.write_text("machines:\n")
        assert read(site, system).machines == {}

    def test_machines_of_two_files_are_merged(self, site, tmp_path):
        system = tmp_path / "system.yaml"
        system.write_text("machines: {old: {gpu: v100}, a100: {gpu: v100}}\n")
        found = read(site, system)
        assert list(found.machines) == ["old", "a100", "l40s"]
        assert found.machines["a100"]["gpu"] == "a100-80gb"

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("machines: {a100: {partition: x}}", "a100 says no gpu"),
            ("machines: {default: {gpu: l4}}", "'default' is no name"),
            ("machines: {1x: {gpu: l4}}", "'1x' is no name"),
            ("machines: {a: {gpu: l4, machines: {b: {gpu: l4}}}}", "a has machines of its own"),
            ("machines: {a: {gpu: l4}, a: {gpu: l4}}", "each once"),
            ("machines: [a100]", "must have names"),
            ("machines: {a: l4}", "machines: a must have settings: write {a: {gpu: l4}}"),
            ("machines: {a: }", "write {a: {gpu: …}}"),
            ("machines: {a: {gpu: l4, partion: x}}", "Did you mean partition"),
            ("machines: {a: {gpu: l4, time: soon}}", "soon"),
            ("machines: {a: {gpu: l400}}", "machines: a: 'l400' is not an accelerator .* Did you mean l40s"),
            ("machines: {a: {gpu: ','}}", "',' is not an accelerator"),
            ("machines: {a: {gpu: l4, venv: /x, conda: y}}", "venv and conda"),
        ],
    )
    def test_what_cannot_be_is_refused(self, site, text, words):
        site.write_text(text)
        with pytest.raises(SiteFileError, match=words):
            read(site)

    def test_the_site_command_shows_them(self, ran):
        assert "{gpu: a100-80gb, partition: ampere" in " ".join(ran(["site"]).out.split())
        shown = json.loads(ran(["site", "--json"]).out)["settings"]["machines"]["value"]
        assert shown["l40s"] == {"gpu": "l40s", "partition": "ada", "gpus_per_node": 8, "time": None}


class TestSubmit:
    def test_each_kind_has_a_script_and_all_are_one_service(self, store, slurm, submit):
        out = submit("--replicas", "a100:1,l40s:2", "--keep-up").out
        assert "s: submitted as job 101 (1 node x 1 GPU of a100, " in out
        assert "s: submitted as job 102 (2 replicas, each 1 node x 1 GPU of l40s, " in out
        assert "if that is too many" not in out
        first, second = slurm.scripts
        assert "#SBATCH --partition=ampere\n" in first
        assert "#SBATCH --time=04:00:00\n" in first
        assert "export NCCL_DEBUG=WARN\n" in first
        assert "#SBATCH --partition=ada\n" in second
        assert "#SBATCH --array=0-1\n" in second
        assert "NCCL_DEBUG" not in second
        assert wanted(store).counts == {"a100": 1, "l40s": 2}
        assert (wanted(store).least, wanted(store).most, wanted(store).count) == (3, 3, 3)
        assert jobs(store) == {"101": "a100", "102_0": "l40s", "102_1": "l40s"}

    def test_json_has_each(self, store, slurm, ran):
        told = json.loads(ran(["submit", "8b", "--name", "s", "--replicas", "default:1,a100:1", "--json"]).out)
        assert [(one["machine"], one["job_id"]) for one in told["submissions"]] == [("default", "101"), ("a100", "102")]
        assert told["service"] == "s"
        status = json.loads(ran(["status", "s", "--json"]).out)
        assert [one["machine"] for one in status["services"]] == ["default", "a100"]
        assert status["wanted"]["s"]["machines"]["a100"]["count"] == 1

    def test_a_refused_kind_takes_the_others_back(self, store, slurm, submit):
        refuse_ampere(slurm)
        submit("--replicas", "l40s:1,a100:1", code=4)
        assert slurm.cancelled == ["101"]
        assert wanted(store) is None

    def test_a_kind_that_does_not_fit_is_refused_before_anything(self, store, slurm, ran):
        ran(["submit", "405b", "--name", "s", "--nodes", "1", "--replicas", "default:1,l40s:1"], 3)
        assert slurm.scripts == []
        assert wanted(store) is None

    def test_a_second_kind_comes_beside_a_service_of_one(self, store, submit):
        submit("--replicas", "2")
        submit("--replicas", "a100:1")
        assert wanted(store).counts == {"default": 2, "a100": 1}
        submit("--replicas", "a100:1")
        assert wanted(store).counts == {"default": 2, "a100": 2}

    def test_all_kinds_have_as_many_replicas_in_a_job(self, store, slurm, submit):
        submit("--replicas", "a100:2")
        said = submit("--replicas", "l40s:2", "--replicas-per-job", "2", code=2).err
        assert "--replicas-per-job is 1 for s, and 2 for l40s" in said
        assert len(slurm.scripts) == 1
        assert wanted(store).counts == {"a100": 2}

    def test_each_kind_has_a_chain(self, store, submit):
        submit("--replicas", "a100:1,l40s:1", "--chain", "2", "--time", "02:00:00")
        assert jobs(store) == {"101": "a100", "102": "a100", "103": "l40s", "104": "l40s"}
        assert [job.predecessor for job in store.read_submitted("s")] == ["", "101", "", "103"]
        assert wanted(store).counts == {"a100": 1, "l40s": 1}

    def test_once_adds_only_the_kind_that_is_missing(self, store, slurm, submit):
        submit("--replicas", "a100:1", "--once")
        submit("--replicas", "a100:1,l40s:1", "--once")
        submit("--once")
        assert wanted(store).counts == {"a100": 1, "l40s": 1}
        assert len(slurm.scripts) == 2
        out = submit("--replicas", "a100:2", "--once").out
        assert "is there already, as job 101" in out
        assert "too many" not in out

    def test_the_note_on_too_many_counts_all_kinds_and_no_job_that_is_ahead(self, store, submit):
        words = ("--replicas", "a100:1,l40s:1", "--chain", "3", "--time", "02:00:00")
        submit(*words)
        out = submit(*words).out
        assert "s has 3 replicas now; it had 2 before" in out
        assert "s has 4 replicas now; it had 2 before" in out

    def test_the_note_on_too_many_counts_a_job_that_is_told_to_end(self, store, submit):
        submit()
        want_stop_of(store, find(store, "101"))
        assert "s has 2 replicas now; it had 1 before" in submit().out

    def test_one_machine_is_not_of_several_kinds(self, store, submit):
        said = submit("--replicas", "a100:1,l40s:1", "--cluster", "local", code=2).err
        assert "--cluster local runs on this machine alone, not on a100 and l40s" in said
        assert not store.read_submitted("s")

    def test_another_kind_ends_nothing_where_the_file_is_gone(self, store, submit):
        submit("--replicas", "l40s:2", "--keep-up")
        wanted_file(store, "s").unlink()
        submit("--replicas", "a100:1", "--keep-up")
        assert wanted(store).counts == {"l40s": 2, "a100": 1}

    @pytest.mark.parametrize(
        ("first", "second"), [(("--replicas", "1:3"), "a100:1"), (("--replicas", "a100:1"), "1:3")]
    )
    def test_bounds_are_for_one_kind(self, store, slurm, submit, first, second):
        submit(*first)
        said = submit("--replicas", second, code=2).err
        assert "MIN:MAX is for a service on one kind of machine" in said
        assert len(slurm.scripts) == 1

    @pytest.mark.parametrize("words", [("--gpu", "l4"), ("--partition", "x"), ("--gpu-memory", "40GiB")])
    def test_one_gpu_for_several_kinds_is_refused(self, slurm, submit, words):
        said = submit("--replicas", "a100:1,l40s:1", *words, code=2).err
        assert f"{words[0]} would be that of a100 and l40s" in said
        assert slurm.scripts == []

    def test_the_line_rendered_by_gives_the_script_again(self, slurm, ran):
        script = ran(["render", "8b", "--replicas", "a100:2"]).out
        line = next(line for line in script.splitlines() if line.startswith("# Rendered by "))
        assert ran(line.partition("hpc-serve render ")[2].join(["render ", ""]).split()).out == script

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("b200:1", "The site file has no machine 'b200'; it has default, a100, l40s"),
            ("a100:0", "replicas is 0"),
            ("a100:1,a100:2", "a100 is named twice"),
            ("a100:", "'a100:' is no number of replicas"),
            ("a100", "h100:2,a100:1 is for machines"),
            ("a100:1, l40s:1", "without spaces"),
            ("a100:1:4", "no MIN:MAX"),
            ("a100:99999", "99999 replicas are asked for: a service has at most 10,000."),
            ("99999", "99999 replicas"),
            ("1:99999", "99999 replicas"),
            ("$(id):1", "'$(id):1' is no number of replicas on a machine"),
        ],
    )
    def test_what_cannot_be_is_refused(self, slurm, submit, words, said):
        assert said in submit("--replicas", words, code=2).err
        assert slurm.scripts == []

    def test_render_takes_one_kind(self, slurm, ran):
        said = ran(["render", "8b", "--replicas", "a100:1,l40s:2"], 2).err
        assert "one kind of machine at a time: --replicas a100:1, or --replicas l40s:2" in said


class TestScale:
    def test_each_kind_by_name_and_the_others_stay(self, store, slurm, submit, ran):
        submit("--replicas", "a100:1,l40s:1")
        *submitted, said = ran(["scale", "s", "l40s:3"]).out.splitlines()
        assert submitted == ["s: submitted as job 103_0", "s: submitted as job 103_1"]
        assert said == "s has 4 replicas (a100:1,l40s:3), it had 2."
        assert slurm.scripts[2] == slurm.scripts[1]
        assert wanted(store).counts == {"a100": 1, "l40s": 3}

    @pytest.mark.parametrize(
        ("replicas", "counts"), [("a100:1,l40s:2", {"a100": 2, "l40s": 2}), ("2", {"default": 2, "a100": 2})]
    )
    def test_a_file_that_is_gone_is_made_of_the_jobs(self, store, submit, replicas, counts):
        submit("--replicas", replicas)
        if "default" in counts:
            submit("--replicas", "a100:1")
        wanted_file(store, "s").unlink()
        scale(store, "s", {"a100": 2})
        assert wanted(store).counts == counts
        assert len(jobs(store)) == 4

    def test_a_kind_without_a_name_is_not_submitted_for_ever(self, store, slurm, submit):
        submit("--replicas", "a100:1")
        path = wanted_file(store, "s")
        found = json.loads(path.read_text())
        path.write_text(json.dumps({**found, "machines": {**found["machines"], "": found["machines"]["a100"]}}))
        scale(store, "s", {"a100": 2})
        assert len(slurm.scripts) == 2

    def test_the_script_of_a_kind_is_not_forgotten_while_it_is_wanted(self, store, slurm, submit, ran):
        submit("--replicas", "a100:1,l40s:1", "--keep-up")
        slurm.queue(("101", "PENDING", "Priority"))
        slurm.job("102", "FAILED")
        said = ran(["forget", "102"], 2).err
        assert "job 102) has the script that replicas on l40s are submitted with" in said
        scale(store, "s", {"l40s": 0})
        ran(["forget", "102"])

    def test_none_of_one_kind(self, store, slurm, submit):
        submit("--replicas", "a100:1,l40s:1")
        slurm.queue(("101", "PENDING", "Priority"), ("102", "PENDING", "Priority"))
        slurm.job("101", "CANCELLED", after_cancel=True, nodes="")
        scale(store, "s", {"a100": 0})
        assert slurm.cancelled == ["101"]
        assert wanted(store).counts == {"l40s": 1}

    @pytest.mark.parametrize(
        ("replicas", "said"),
        [
            (3, "s has replicas on a100:1,l40s:1: say which"),
            ({"b200": 1}, "s has no script for b200"),
            ({"b200": 0}, "s has no script for b200: leave out b200:0. It has been on "),
            ({"a100": 0, "l40s": 0}, "`hpc-serve stop s` ends it"),
        ],
    )
    def test_what_cannot_be_is_refused(self, store, submit, replicas, said):
        submit("--replicas", "a100:1,l40s:1")
        before = wanted(store)
        with pytest.raises(InvalidRequestError, match=said):
            scale(store, "s", replicas)
        with pytest.raises(InvalidRequestError, match="MIN:MAX is for one kind"):
            set_bounds(store, "s", 1, 3)
        assert wanted(store) == before

    def test_of_a_stopped_service_only_what_is_named_comes(self, store, slurm, submit):
        submit("--replicas", "a100:1,l40s:1")
        stop_all(store, slurm)
        assert [job.machine for job in scale(store, "s", {"l40s": 2}).added] == ["l40s", "l40s"]
        assert wanted(store).counts == {"l40s": 2}

    def test_a_refused_kind_does_not_keep_the_others_away(self, store, slurm, submit, ran):
        submit("--replicas", "a100:1,l40s:1", "--keep-up")
        refuse_ampere(slurm)
        with pytest.raises(HpcServeError, match=r"sbatch refused .* Submitted all the same: job 103_0 \(l40s\)\.$"):
            scale(store, "s", {"a100": 2, "l40s": 2})
        assert list(jobs(store).values()) == ["a100", "l40s", "l40s"]
        assert "on a100: one could not be added: sbatch refused" in " ".join(ran(["status", "s"]).out.split())

    def test_bounds_come_back_where_only_the_default_is_left(self, store, submit):
        submit("--replicas", "1:4")
        scale(store, "s", {"default": 2})
        assert wanted(store).counts == {"default": 2}
        set_bounds(store, "s", 1, 4)
        assert (wanted(store).counts, wanted(store).least, wanted(store).most) == ({}, 1, 4)

    def test_one_number_is_for_the_only_kind(self, store, submit):
        submit("--replicas", "a100:1")
        scale(store, "s", 2)
        assert wanted(store).counts == {"a100": 2}


def test_a_job_that_a_person_stops_is_wanted_no_more(store, submit):
    submit("--replicas", "a100:1,l40s:2")
    want_stop_of(store, find(store, "102_0"))
    assert wanted(store).counts == {"a100": 1, "l40s": 1}
    want_stop_of(store, find(store, "101"))
    assert wanted(store).counts == {"l40s": 1}


def test_all_kinds_are_woken(store, slurm, submit):
    submit("--replicas", "a100:1,l40s:1", "--idle-stop", "30m")
    stop_all(store, slurm)
    woken = wake(store, "s")
    assert [(job.machine, job.job_id) for job in woken.jobs] == [("a100", "103_0"), ("l40s", "104_0")]


def test_where_one_kind_is_refused_the_others_wake_and_stay_awake(store, slurm, submit):
    submit("--replicas", "a100:1,l40s:1", "--idle-stop", "30m")
    stop_all(store, slurm)
    before = {job.job_id: job.machine for job in store.read_submitted("s")}.items()
    refuse_ampere(slurm)
    with pytest.raises(HpcServeError, match=r"sbatch refused .* job 103_0 \(l40s\)\.$"):
        wake(store, "s")
    assert {job.job_id: job.machine for job in store.read_submitted("s")}.items() - before == {("103_0", "l40s")}
    assert wanted(store).state == "awake"
