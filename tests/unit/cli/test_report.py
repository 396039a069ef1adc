"""The page of `report`: what it shows, and that nothing that others wrote becomes part of it."""

from __future__ import annotations

import errno
import os
import re
import time

from hpc_serve.cli.show import figure_name
from hpc_serve.pages.frame import Curve, over_time, stage_bar
from hpc_serve.rendezvous.record import NodeRecord, StartRecord
from tests.support.refusals import refuse
from tests.support.stubs import StubService, make_record, make_submitted
from tests.unit.pages.test_frame import Parts
from tests.unit.submit.test_logs import LOG

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J&'


def test_a_replica_that_serves(store, ran):
    service = StubService(store.home, "8b")
    predicted = {"kv_cache_bytes": 2.0 * 2**30, "output_tokens_per_s_at_1": 120.0, "output_tokens_per_s_at_4": 450.0}
    predicted |= {"request_input_tokens": 1024.0, "request_output_tokens": 256.0}
    here = {"service": "8b", "job_id": "7", "cluster": "local"}
    store.write_submitted(make_submitted(**here, predicted=predicted, engine_args=("--max-model-len", "4096")))
    log_dir = store.log_dir("8b")
    service.start(
        **here,
        log_dir=str(log_dir),
        nodes=(NodeRecord(name="n1", address="10.0.0.1"),),
        start=StartRecord(stage="", since=1.0, took_s={"nodes": 1.0, "engine": 286.0, "weights": 22.25}),
        cache="cold, nothing was kept",
        measured={"kv_cache_bytes": 1.5 * 2**30},
    )
    log = LOG.replace("2026-", time.strftime("%Y-")).replace("11-22", time.strftime("%m-%d"))
    (log_dir / "7-node0.log").write_text(log)
    text = ran(["report", "8b", "--output", "-"]).out
    shown = re.sub(r"<[^>]*>", "|", text)
    for words in (
        *("|8b job 7 |", "|--max-model-len 4096|", "|engine|", "|286.0 s|", "|22.2 s|", "|0 running, 0 waiting|"),
        *("|450|", "|2.00 GiB|", "|1.50 GiB|", "|-25.0 %|", "2 reports that vLLM wrote"),
        " until it was ready. Caches: cold, nothing was kept.",
        "Expected of requests of 1,024 tokens in and 256 out:",
        "planned, for as many requests as there were at that moment",
    ):
        assert words in shown, words
    assert Parts(text).tags.count("svg") == 5
    service.close()


def test_nothing_of_others_becomes_part_of_the_page(store, ran):
    log_dir = store.log_dir("8b")
    store.ensure_api_key("8b")
    secret = "hf_" + "abcdefgh12345678"
    here = {"service": "8b", "job_id": "7", "cluster": "local"}
    evil = dict.fromkeys(("model", "reason", "failed_part", "stand_in", "cache"), EVIL)
    figures = {name: {EVIL: 1.0, "x": 2.0} for name in ("measured", "predicted")}
    evil_lines = {"log_dir": str(log_dir), "last_log_lines": (EVIL, f"HF_TOKEN={secret}")}
    start = StartRecord(stage="weights", since=1.0, took_s={EVIL: 50.0})
    nodes = (NodeRecord(name=EVIL, address=EVIL),)
    store.write(make_record(**here, **evil, **figures, **evil_lines, state="failed", start=start, nodes=nodes))
    store.write_submitted(make_submitted(**here, engine_args=(EVIL,)))
    log = LOG.replace("LlamaForCausalLM", EVIL) + f"ValueError: {EVIL} HF_TOKEN={secret}\n"
    (log_dir / "7-node0.log").write_text(log)
    text = ran(["report", "8b", "--output", "-"]).out
    page = Parts(text)
    assert {"script", "img", "a", "link", "iframe", "object", "form"} & set(page.tags) == set()
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert "alert(1)" in text
    assert [hidden for hidden in ("\x1b", secret, store.read_api_key("8b")) if hidden in text] == []
    assert "default-src 'none'" in dict(page.attributes)["content"]


def test_a_full_disk_of_the_page_is_not_said_to_be_that_of_the_services(store, ran, tmp_path, monkeypatch):
    store.ensure_api_key("8b")
    store.write(make_record(service="8b", job_id="7", cluster="local", state="stopped"))
    refuse(monkeypatch, os, "replace", errno.ENOSPC)
    said = ran(["report", "8b", "--output", str(tmp_path / "page.html")], 5).err
    assert "page.html: No space left on device" in said
    assert "free space there, or write elsewhere" in said
    assert "set HPC_SERVE_HOME" not in said


def test_what_is_not_known_is_said(store, ran):
    store.ensure_api_key("8b")
    for job_id, state in (("7", "stopped"), ("8", "starting"), ("9", "starting")):
        store.write(make_record(service="8b", job_id=job_id, cluster="local", state=state))
    text = ran(["report", "8b", "--output", "-"]).out
    unknown = "No figure is both predicted and measured: the plan was not written down."
    for words in ("The plan was not written down", "tells no stage of it", unknown, "No figures over time"):
        assert words in text
    Parts(text)
    assert re.findall(r"<h2>8b job (\w+)", text) == ["8", "9"], "what is not over"
    assert re.findall(r"<h2>8b job (\w+)", ran(["report", "7", "--output", "-"]).out) == ["7"]


def test_the_file_is_private_and_where_it_cannot_be_is_said(store, tmp_path, monkeypatch, ran):
    monkeypatch.chdir(tmp_path)
    store.ensure_api_key("8b")
    store.write(make_record(service="8b", job_id="7", cluster="local", state="starting"))
    ran(["report", "8b"])
    assert (tmp_path / "hpc-serve-report-8b.html").stat().st_mode & 0o777 == 0o600
    assert "there is no folder" in ran(["report", "8b", "--output", "nowhere/x.html"], 2).err
    ran(["report", "70b"], 5)


def test_pictures_of_nothing_are_empty_and_of_much_are_thinned_out():
    assert stage_bar([]) == over_time("x", []) == over_time("x", [Curve(name="y", points=[])]) == ""
    many = [(10.0 * place, float(place % 7)) for place in range(50_000)]
    picture = over_time("x", [Curve(name="y", points=many)])
    assert len(picture) < 20_000
    assert picture.count("<polyline") == 1
    gap = over_time("x", [Curve(name="y", points=[(0.0, 1.0), (10.0, 1.0), (500.0, 0.0)])])
    assert (gap.count("<polyline"), gap.count("<circle")) == (1, 1)


def test_figures_have_words_and_no_raw_keys() -> None:
    for key in ("kv_cache_bytes", "max_concurrency", "num_blocks", "loading_weights_s", "new_one"):
        assert "_" not in figure_name(key)
