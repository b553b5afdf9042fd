"""Load on a server of the command line: no answer wrong or lost, memory flat, and a signal in the middle."""

import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tests.support import chat, serving
from tests.support.load import Load
from tests.support.serving import CHAT, CONFIG, KEY, chat_body, until


@pytest.mark.exhaustive(by="tests/fastjax/serving/test_streams.py::test_a_signal_drains_and_a_second_one_ends")
def test_load(tmp_path):
    chat.write_model(tmp_path / "tiny", CONFIG)
    serving.write_adapters(tmp_path / "adapters")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "fastjax", "serve", "--model", str(tmp_path / "tiny"), "--port", str(port)]
    command += ["--adapters", str(tmp_path / "adapters"), "--adapter_rank", "4", "--rows", "8", "--queue", "128"]
    command += ["--dtype", "float32", "--max_seq_length", "256"]
    url = f"http://127.0.0.1:{port}"
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, env={**os.environ, "FASTJAX_API_KEY": KEY}, stderr=log, stdout=log)
    try:
        until(lambda: server.poll() is None and listens(port), seconds=300)
        load = Load(url, KEY, server.pid, ["tiny", "sums", "Tales"], adapter="sums")
        load.run(20.0)
        assert not load.wrong, load.told()
        assert load.counts["whole"] + load.counts["stream"] > 50 and load.counts["cut"] and load.counts["broken body"]
        assert load.threads[-1] == load.threads[0] and load.memory[-1] < 1.2 * load.memory[4], load.told()
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            body = chat_body(max_tokens=150, ignore_eos=True, stream=True)
            with client.stream("POST", CHAT, json=body) as response:
                lines = response.iter_lines()
                next(lines)
                server.send_signal(signal.SIGTERM)
                until(lambda: client.get("/health").status_code == 503)
                said = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert said[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait(60) == 0
        words = (tmp_path / "log").read_text()
        assert "question" not in words and KEY not in words
    finally:
        server.kill()
        server.wait()


def listens(port):
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
