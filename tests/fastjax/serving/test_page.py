"""The page's files and the rows of its curves, over HTTP; test_page_in_browser.py drives it."""

import json
import re
import types
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from fastjax.errors import ConfigError
from fastjax.serving import page
from fastjax.serving.page import curves
from fastjax.training.metrics import JsonLines

FOLDER = Path(page.__file__).parent


def client(run=None) -> TestClient:
    return TestClient(Starlette(routes=page.routes(types.SimpleNamespace(run=run))))


def steps(*numbers):
    return [{"step": n, "loss": 2.0 / n, "learning_rate": 1e-4, "tokens_per_second": 100.0 * n} for n in numbers]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.yaml").write_text("output: {run_name: my run}\n")
    return tmp_path


def test_every_file_of_the_page_is_served_and_no_other():
    there = {file.name for file in FOLDER.iterdir() if file.is_file() and file.suffix != ".py"}
    assert there == {"index.html", *page.FILES}
    served = client()
    assert {"/", *(f"/page/{name}" for name in page.FILES)} == page.OPEN_PATHS
    for path in page.OPEN_PATHS:
        answer = served.get(path)
        file = FOLDER / (path.rpartition("/")[2] or "index.html")
        assert (answer.status_code, answer.content) == (200, file.read_bytes())
        assert answer.headers["content-type"].partition(";")[0] == page.MEDIA_TYPES[file.suffix]


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page/",
        "/page/__init__.py",
        "/page/index.html",
        "/page/../curves.py",
        "/page/%2e%2e/worker.py",
        "/page/..%2f..%2ferrors.py",
        "/page//etc/passwd",
        "/page/page.css%00.js",
        "/page/PAGE.CSS",
    ],
)
def test_a_path_that_is_no_file_of_the_page_is_not_found(path):
    assert client().get(path, follow_redirects=False).status_code == 404


@pytest.mark.parametrize("path", [*sorted(page.OPEN_PATHS), "/run", "/run?offset=x"])
def test_a_browser_runs_and_fetches_nothing_but_the_servers_own(path):
    headers = client().get(path).headers
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        **dict.fromkeys(("script-src", "style-src", "img-src", "connect-src"), "'self'"),
        **dict.fromkeys(("base-uri", "form-action", "frame-ancestors", "trusted-types"), "'none'"),
        "require-trusted-types-for": "'script'",
    }
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == ("no-store" if path.startswith("/run") else "no-cache")
    assert "access-control-allow-origin" not in headers


def test_the_page_names_nothing_from_elsewhere_and_reads_no_text_as_html():
    """The policy would stop it; the page does not try."""
    for name in ("index.html", *page.FILES):
        text = (FOLDER / name).read_text("utf-8")
        known = re.sub(r"http://www\.w3\.org/2000/svg", "", text)
        assert not re.search(r"https?://|(src|href)=\"//|url\(|@import", known), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
        assert not re.search(r"location\.(search|hash|href)|document\.(URL|referrer)", text), name
    html = (FOLDER / "index.html").read_text("utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
    assert set(re.findall(r'(?:src|href)="(/[^"]*)"', html)) <= page.OPEN_PATHS


def test_without_a_run_there_are_no_curves():
    assert client().get("/run").json() == {"run": None}


def test_a_growing_file_is_read_from_where_the_last_answer_ended(run):
    served = client(run)

    def read(before):
        return served.get("/run", params={"file": before["file"], "offset": before["offset"]}).json()["run"]

    nothing = served.get("/run").json()["run"]
    assert (nothing["name"], nothing["offset"], nothing["steps"], nothing["last"]) == ("my run", 0, [], None)
    lines = JsonLines(run / "metrics.jsonl")
    for row in ({"step": 0, "event": "started", "message": "on a card"}, *steps(1, 2), {"step": 2, "eval_loss": 1.5}):
        lines.write(row)
    lines.close()
    first = read(nothing)
    assert first["restarted"] and first["events"] == [{"step": 0, "event": "started", "message": "on a card"}]
    assert [(row["step"], row["loss"], row["tokens_per_second"]) for row in first["steps"]] == [
        (1, 2, 100),
        (2, 1, 200),
    ]
    assert first["evaluations"] == [{"step": 2, "eval_loss": 1.5}]
    assert first["last"] == "" and first["offset"] == (run / "metrics.jsonl").stat().st_size

    with open(run / "metrics.jsonl", "a") as file:  # a line in the middle of being written
        file.write('{"step": 3, "lo')
    torn = read(first)
    assert (torn["restarted"], torn["steps"], torn["offset"], torn["more"]) == (False, [], first["offset"], False)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('ss": NaN}\n{"step": 3, "event": "finished", "message": ""}\n')
    last = read(torn)
    assert [(row["step"], row["loss"], row["learning_rate"]) for row in last["steps"]] == [(3, None, None)]
    assert last["last"] == "finished" and read(last)["last"] is None and 0 <= last["age"] < 60


def test_a_file_that_was_replaced_is_read_from_its_beginning(run):
    """A resumed run keeps its first rows, a new one has none of them; both files may be longer than the place read."""
    served = client(run)

    def write(rows, resume=None):
        lines = JsonLines(run / "metrics.jsonl", resume)
        for row in rows:
            lines.write(row)
        lines.close()

    write(steps(1, 2, 3))
    before = served.get("/run").json()["run"]
    write(steps(3, 4, 5), resume=2)
    resumed = served.get("/run", params={"file": before["file"], "offset": before["offset"]}).json()["run"]
    assert resumed["restarted"] and [row["step"] for row in resumed["steps"]] == [1, 2, 3, 4, 5]
    beyond = served.get("/run", params={"file": resumed["file"], "offset": 10**9}).json()["run"]
    assert beyond["restarted"] and len(beyond["steps"]) == 5


def test_a_long_file_comes_in_parts(run, monkeypatch):
    monkeypatch.setattr(curves, "MOST_BYTES", 400)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*steps(*range(1, 40))]))
    served, found, place = curves.RunCurves(run), [], ("", 0)
    for _ in range(40):
        part = served.read(*place)
        found += [row["step"] for row in part["steps"]]
        place = part["file"], part["offset"]
        if not part["more"]:
            break
    assert found == list(range(1, 40))


@pytest.mark.parametrize("offset", ["-1", "1.5", "x", "", "9" * 19, "٣"])
def test_an_offset_that_is_no_number_is_refused(run, offset):
    answer = client(run).get("/run", params={"offset": offset})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "offset" and error["message"].startswith("offset: expected a number of bytes")
    assert repr(offset) in error["message"]


def test_a_run_that_is_no_folder_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"run: expected the output folder of a run, .*/gone, which is not there"):
        page.routes(types.SimpleNamespace(run=tmp_path / "gone"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"got .*/file, which is a file"):
        page.routes(types.SimpleNamespace(run=tmp_path / "file"))
