"""Adapters of a running server: by names in the named folders, with the key alone."""

import os
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from fastjax.errors import ConfigError
from tests.support import serving
from tests.support.serving import CHAT, KEY, chat_body

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    serving.write_adapters(folder / "served")
    serving.write_adapters(folder / "elsewhere")
    os.symlink(folder / "elsewhere" / "sums", folder / "served" / "out")
    os.mkdir(folder / "served" / "half")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        os.symlink(folder / "elsewhere" / "sums" / name, folder / "served" / "half" / name)
    serving.write_adapters(folder / "served" / "deep")
    for part in (folder / "served" / "deep" / "sums").iterdir():
        part.rename(folder / "served" / "deep" / part.name)
    (folder / "served" / "deep" / "templates").mkdir()
    os.symlink(folder / "elsewhere" / "sums" / "adapter_config.json", folder / "served" / "deep" / "templates" / "a")
    return folder


@pytest.fixture(scope="module")
def server(place):
    with serving.served(
        serving.engine(adapter_slots=3, adapter_rank=4), key=KEY, adapters=[str(place / "served")]
    ) as running:
        yield running


def test_one_comes_and_goes(server):
    answer = server.ok(CHAT, chat_body(model="sums"))["choices"]
    server.ok(LOAD, {"lora_name": "again", "lora_path": "sums"})
    assert server.ok(CHAT, chat_body(model="again"))["choices"] == answer  # one folder under two names
    taken = server.post(LOAD, {"lora_name": "again", "lora_path": "Tales"})
    assert taken.status_code == 400 and "a name that is not taken" in taken.json()["error"]["message"]
    full = server.post(LOAD, {"lora_name": "fourth", "lora_path": "Tales"})
    assert full.status_code == 400 and "free slot" in full.json()["error"]["message"]
    server.ok(UNLOAD, {"lora_name": "again"})
    assert server.refused(CHAT, chat_body(model="again"), 404)["code"] == "model_not_found"
    assert server.post(UNLOAD, {"lora_name": "again"}).status_code == 404
    assert server.post(UNLOAD, {"lora_name": "tiny"}).status_code == 400
    assert server.ok(CHAT, chat_body(model="sums"))["choices"] == answer


def test_one_that_is_dropped_in_use(server):
    body = chat_body(n=8, temperature=1.0, max_tokens=60, ignore_eos=True)
    server.ok(LOAD, {"lora_name": "used", "lora_path": "sums"})
    with server.client.stream("POST", CHAT, json={**body, "model": "used", "stream": True}) as response:
        events = response.iter_lines()
        next(events)
        server.ok(UNLOAD, {"lora_name": "used"})
        assert server.post(CHAT, {**body, "model": "used"}).status_code == 404
        ends = [line for line in events if '"finish_reason":"length"' in line]
    assert len(ends) == 8
    server.ok(LOAD, {"lora_name": "used", "lora_path": "Tales"})  # its slot is free again
    server.ok(UNLOAD, {"lora_name": "used"})


@pytest.mark.parametrize(
    "path",
    [
        "../elsewhere/sums",
        "..",
        ".",
        "",
        "/etc",
        "a%2f..",
        "out",
        "half",
        "deep",
        "none",
        "sums/",
        "sums\x00",
        "a/../sums",
    ],
)
def test_nothing_is_read_elsewhere(server, place, path):
    response = server.post(LOAD, {"lora_name": "new", "lora_path": path})
    error = response.json()["error"]
    assert response.status_code == 404 and error["code"] == "adapter_not_found" and str(place) not in error["message"]
    full = server.post(LOAD, {"lora_name": "new", "lora_path": str(place / "served" / "sums")})
    assert full.json()["error"] == error  # one answer, whatever is there
    assert server.client.get("/v1/models").json()["data"][-1]["id"] != "new"


def test_one_name_in_two_folders(place):
    folders = [str(place / name) for name in ("served", "elsewhere")]
    with pytest.raises(ConfigError, match="adapters: expected a name that is not taken, got .*elsewhere/Tales"):
        with serving.served(serving.engine(adapter_slots=3, adapter_rank=4), adapters=folders):
            pass


def test_while_the_server_ends(place):
    with serving.served(
        serving.engine(adapter_slots=3, adapter_rank=4), key=KEY, adapters=[str(place / "served")]
    ) as server:
        assert server.worker.close()
        assert server.post(LOAD, {"lora_name": "new", "lora_path": "sums"}).status_code == 503
        assert server.post(UNLOAD, {"lora_name": "sums"}).status_code == 503


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda name, array: (name.replace("model.layers", "elsewhere"), array), "elsewhere"),
        (lambda name, array: (name, array[:, :-1].copy()), "self_attn"),
    ],
    ids=["names", "shapes"],
)
def test_arrays_that_are_not_of_the_model(server, place, change, told):
    folder = place / "served" / "wrong"
    shutil.copytree(place / "served" / "sums", folder, dirs_exist_ok=True)
    file = folder / "adapter_model.safetensors"
    save_file(dict(change(*one) for one in load_file(file).items()), file)
    try:
        response = server.post(LOAD, {"lora_name": "wrong", "lora_path": "wrong"})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "lora_path" and told in error["message"]
        assert str(place) not in error["message"]
        assert server.refused(CHAT, chat_body(model="wrong"), 404)["code"] == "model_not_found"
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["../x", "a b", "", "<script>", "é", "x" * 129])
def test_a_name_that_is_none(server, name):
    assert server.post(LOAD, {"lora_name": name, "lora_path": "sums"}).status_code == 400


def test_without_a_key_none_is_loaded(place):
    with serving.served(serving.engine(adapter_slots=3, adapter_rank=4), adapters=[str(place / "served")]) as server:
        assert server.ok("/tokenize", {"prompt": "a", "model": "sums"})["count"] == 1
        for path in (LOAD, UNLOAD):
            assert server.post(path, {"lora_name": "sums"}).status_code == 403
