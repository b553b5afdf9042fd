"""Load on a server: clients that compare every answer, slow readers, cut connections, broken bodies, floods, adapters.

`python -m tests.support.load URL KEY PID SECONDS` loads a server that runs, and prints figures.
"""

import collections
import concurrent.futures
import json
import os
import random
import socket
import sys
import threading
import time

import httpx

CHAT = "/v1/chat/completions"
TOKENS = 24


class Load:
    """Clients of one server.

    Attributes:
        counts: what happened, by name.
        wrong: answers that were not the expected one, or had no end.
        seconds: of each whole answer.
    """

    def __init__(self, url, key, pid, models, *, clients=64, prompts=8, adapter=None):
        self.url, self.pid, self.adapter = url, pid, adapter
        self.headers = {"Authorization": f"Bearer {key}"}
        self.counts, self.wrong, self.seconds, self.memory, self.threads = collections.Counter(), [], [], [], []
        self._clients, self._end, self._lock = clients, threading.Event(), threading.Lock()
        self._asked = [
            (model, f"question {number} 👍 " + "word " * (number % 3) * 9)
            for model in models
            for number in range(prompts)
        ]
        with self._client() as client:
            self._expected = {one: self._text(client, one) for one in self._asked}

    def run(self, seconds):
        """Load the server for some seconds; figures of its process are taken ten times."""
        jobs = [self._client_of(number) for number in range(self._clients)]
        jobs += [self._flood] + ([] if self.adapter is None else [self._adapters])
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            running = [pool.submit(job) for job in jobs]
            for _ in range(10):
                time.sleep(seconds / 10)
                self.memory.append(figure(self.pid, "VmRSS"))
                self.threads.append(figure(self.pid, "Threads"))
            self._end.set()
            for job in running:
                job.result()

    def _client(self):
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=120)

    def _body(self, one, **more):
        model, text = one
        messages = [{"role": "user", "content": text}]
        return {
            "model": model,
            "messages": messages,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }

    def _text(self, client, one):
        response = client.post(CHAT, json=self._body(one))
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    def _note(self, name, wrong=None):
        with self._lock:
            self.counts[name] += 1
            if wrong is not None:
                self.wrong.append(wrong)

    def _client_of(self, number):
        draw = random.Random(number)
        kinds = [self._whole] * 4 + [self._stream] * 4 + [self._slow, self._cut, self._half, self._broken]

        def work():
            with self._client() as client:
                while not self._end.is_set():
                    try:
                        draw.choice(kinds)(client, draw, draw.choice(self._asked))
                    except (httpx.TransportError, OSError) as error:
                        self._note("lost", repr(error))

        return work

    def _whole(self, client, draw, one):
        began = time.monotonic()
        response = client.post(CHAT, json=self._body(one))
        if response.status_code == 429:
            self._note("whole 429")
            time.sleep(draw.random())
            return
        said = response.json()["choices"][0]["message"]["content"] if response.status_code == 200 else None
        with self._lock:
            self.seconds.append(time.monotonic() - began)
        self._note("whole", None if said == self._expected[one] else (one, response.status_code, response.text[:300]))

    def _stream(self, client, draw, one, pause=0.0):
        said, done = "", False
        with client.stream("POST", CHAT, json=self._body(one, stream=True)) as response:
            if response.status_code == 429:
                self._note("stream 429")
                return
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    said += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                time.sleep(pause)
        right = done and said == self._expected[one]
        self._note("stream" if not pause else "slow stream", None if right else (one, response.status_code, said, done))

    def _slow(self, client, draw, one):
        self._stream(client, draw, one, pause=0.2)

    def _connection(self, data):
        connection = socket.create_connection(client_address(self.url), timeout=60)
        connection.sendall(data)
        return connection

    def _raw(self, body, length=None):
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Authorization: {self.headers['Authorization']}\r\n"
        return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body

    def _cut(self, client, draw, one):
        """Gone within the answer, or before it."""
        body = json.dumps(self._body(one, stream=draw.random() < 0.7, n=draw.choice([1, 2, 4]))).encode()
        with self._connection(self._raw(body)) as connection:
            time.sleep(draw.random() * 0.2)
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0" if draw.random() < 0.5 else b"\0" * 8
            )
        self._note("cut")

    def _half(self, client, draw, one):
        """Gone within the body."""
        body = json.dumps(self._body(one)).encode()
        self._connection(self._raw(body[: draw.randrange(len(body))], len(body))).close()
        self._note("half a body")

    def _broken(self, client, draw, one):
        body = bytearray(json.dumps(self._body(one, max_tokens=1)).encode())
        body[draw.randrange(len(body))] = draw.randrange(256)
        response = client.post(CHAT, content=bytes(body), headers={"Content-Type": "application/json"})
        right = response.status_code in (200, 400, 404, 429)
        self._note("broken body", None if right else (bytes(body), response.status_code, response.text[:300]))

    def _flood(self):
        """More than the queue takes, at once."""
        with self._client() as client, concurrent.futures.ThreadPoolExecutor(8) as pool:
            while not self._end.wait(2.0):
                asked = [self._body(self._asked[0], n=64, max_tokens=4) for _ in range(8)]
                for response in pool.map(lambda body: client.post(CHAT, json=body), asked):
                    right = response.status_code == 200 or (
                        response.status_code == 429 and "retry-after" in response.headers
                    )
                    self._note(
                        f"flood {response.status_code}", None if right else (response.status_code, response.text[:300])
                    )

    def _adapters(self):
        """One is loaded, asked, and dropped while it is asked."""
        with self._client() as client, concurrent.futures.ThreadPoolExecutor(4) as pool:
            while not self._end.wait(0.2):
                loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "extra", "lora_path": self.adapter})
                self._note(f"load {loaded.status_code}", None if loaded.status_code in (200, 400) else loaded.text)
                if loaded.status_code != 200:
                    continue
                body = self._body(("extra", self._asked[0][1]))
                asked = [pool.submit(client.post, CHAT, json=body) for _ in range(4)]
                time.sleep(0.02)
                dropped = client.post("/v1/unload_lora_adapter", json={"lora_name": "extra"})
                self._note(f"drop {dropped.status_code}", None if dropped.status_code == 200 else dropped.text)
                for response in (one.result() for one in asked):
                    said = response.json()["choices"][0]["message"]["content"] if response.status_code == 200 else ""
                    right = (
                        response.status_code in (404, 429) or said == self._expected[self.adapter, self._asked[0][1]]
                    )
                    self._note(f"extra {response.status_code}", None if right else response.text[:300])

    def told(self):
        """The figures, in words."""
        seconds = sorted(self.seconds)
        parts = (
            [f"p{share}: {seconds[int(len(seconds) * share / 100)]:.2f} s" for share in (50, 95, 99)] if seconds else []
        )
        memory = [round(each / 2**10) for each in self.memory]
        return "\n".join(
            [
                f"wrong or lost: {len(self.wrong)} {self.wrong[:3]}",
                f"whole answers: {', '.join(parts)}",
                f"memory, MiB: {memory}",
                f"threads: {self.threads}",
                *(f"{name}: {count}" for name, count in sorted(self.counts.items())),
            ]
        )


def client_address(url):
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def figure(pid, name):
    """A number of /proc/PID/status: VmRSS in KiB, Threads."""
    with open(f"/proc/{pid}/status") as file:
        return int(next(line for line in file if line.startswith(name + ":")).split()[1])


if __name__ == "__main__":
    url, key, pid, seconds, *models = sys.argv[1:]
    load = Load(url, key, pid, models, adapter=models[1] if len(models) > 1 else None)
    load.run(float(seconds))
    print(load.told(), flush=True)
    os._exit(1 if load.wrong else 0)
