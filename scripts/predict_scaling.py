"""What a step of many hosts would take by the links, from figures measured on one GPU and between two.

    python3 scripts/predict_scaling.py          # the table of docs/parallel.md

A ring of H GPUs a host and N hosts sums b bytes by 2·(H-1)/H·b on a GPU's NVLink and 2·(N-1)/N·b/H on its network
card, both at once; it gathers or scatters them by (HN-1)/HN·b and (N-1)/N·b/H. An all-to-all of b bytes a GPU sends
(N-1)/N·b over the network card: nothing of it is summed in the host first. A hop takes `hop_seconds` more.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from convert.model.config import ModelConfig
from fastjax.bench.step.presets import preset_config
from fastjax.lora.sites import projections
from fastjax.parallel.exchange import link_share
from fastjax.training.flops import matrix_parameters, step_flops

#: Rows × tokens of a GPU in a step, and the rank of the adapters.
ROWS, TOKENS, RANK = 4, 2048, 16
#: Measured on one H200: the QLoRA step of Llama 3 8B with these.
MEASURED_SECONDS = 0.475
HOSTS = (1, 8, 64)


class Links(NamedTuple):
    """Of a cluster.

    Attributes:
        gpus: of a host.
        host: bytes a second of a GPU's NVLink; an all-reduce of 1 GiB between two H200s, measured.
        host_parts: the same of an all-to-all, measured.
        network: bytes a second of a GPU's network card: 400 Gb/s, of which 0.8 are assumed to be reached.
        hop_seconds: from GPU to GPU in a host, and from host to host; assumed.
    """

    gpus: int = 8
    host: float = 281e9
    host_parts: float = 353e9
    network: float = 0.8 * 50e9
    hop_seconds: tuple[float, float] = (2e-6, 8e-6)

    def hops(self, hosts: int) -> float:
        """Seconds of one way around a ring."""
        near, far = self.hop_seconds
        return hosts * (self.gpus - 1) * near + (hosts - 1) * far

    def all_reduce(self, size: float, hosts: int) -> float:
        """Seconds of a sum of so many bytes over all GPUs; small ones by trees, so that hops are few."""
        near, far = self.hop_seconds
        ways = (2 * (self.gpus - 1) / self.gpus * size / self.host, 2 * self._network(size, hosts))
        return max(ways) + 2 * ((self.gpus - 1) * near + math.log2(hosts) * far)

    def all_gather(self, size: float, hosts: int) -> float:
        """Seconds in which every GPU gets so many bytes, of which each has its part; also of a sum in parts."""
        devices = self.gpus * hosts
        return max((devices - 1) / devices * size / self.host, self._network(size, hosts)) + self.hops(hosts)

    def all_to_all(self, size: float, hosts: int) -> float:
        """Seconds in which every GPU sends so many bytes, a part to each."""
        devices = self.gpus * hosts
        near, far = (self.gpus - 1) / devices * size, (hosts - 1) / hosts * size
        return max(near / self.host_parts, far / self.network) + self.hops(hosts)

    def _network(self, size: float, hosts: int) -> float:
        return (hosts - 1) / hosts * size / self.gpus / self.network


class Step(NamedTuple):
    """A step of many GPUs.

    Attributes:
        compute: seconds on one GPU.
        link: seconds of collectives that can overlap with it, at best wholly.
        after: seconds of those that come after the backward pass.
    """

    compute: float
    link: float
    after: float

    @property
    def shares(self) -> tuple[float, float]:
        """Of linear scaling: where nothing overlaps, and where all that can does."""
        worst = self.compute + self.link + self.after
        return self.compute / worst, self.compute / (max(self.compute, self.link) + self.after)


def config_of(preset: str) -> ModelConfig:
    """The model of a preset."""
    return ModelConfig.from_hf(preset_config(preset, None, "16bit"))


def parameters(config: ModelConfig) -> int:
    """All of a model's."""
    return sum(math.prod(spec.shape) for spec in config.specs)


def adapter_parameters(config: ModelConfig) -> int:
    """Of adapters of rank `RANK` on every projection."""
    names = set(projections(config))
    return sum(RANK * sum(spec.shape) for spec in config.specs if spec.kind == "matrix" and spec.path.part in names)


def compute_seconds(config: ModelConfig, *, full: bool) -> float:
    """Of a step on one GPU, at the rate of the measured one."""

    def flops(config: ModelConfig, **trained: Any) -> float:
        return step_flops(config, tokens=ROWS * TOKENS, document_length=TOKENS, **trained)

    known = config_of("llama3-8b")
    rate = flops(known, adapter_parameters=adapter_parameters(known)) / MEASURED_SECONDS
    trained = {"trained_parameters": matrix_parameters(config)} if full else {}
    return flops(config, **trained or {"adapter_parameters": adapter_parameters(config)}) / rate


def lora(preset: str, hosts: int, links: Links) -> Step:
    """Adapters whose float32 gradients are summed after the backward pass."""
    config = config_of(preset)
    return Step(compute_seconds(config, full=False), 0.0, links.all_reduce(4.0 * adapter_parameters(config), hosts))


def replicas(preset: str, hosts: int, links: Links, exchange: str) -> Step:
    """Every weight trained, on each GPU whole; gradients as `gradient_exchange` sends them."""
    config = config_of(preset)
    size = 4.0 * parameters(config) * link_share(exchange)
    if exchange == "float32":
        return Step(compute_seconds(config, full=True), links.all_reduce(size, hosts), 0.0)
    seconds = links.all_to_all(size, hosts) + links.all_gather(size, hosts)
    return Step(compute_seconds(config, full=True), 0.0, seconds)


def shards(preset: str, hosts: int, links: Links, *, over_hosts: bool) -> Step:
    """Every weight trained in bfloat16 under `fsdp`: a host's GPUs share a copy, or those of all hosts."""
    config = config_of(preset)
    size, layers = 2.0 * parameters(config), config.num_hidden_layers
    there = hosts if over_hosts else 1
    link = 3 * layers * links.all_gather(size / layers, there)  # twice gathered, once scattered
    if not over_hosts:
        link += 2 * links._network(size, hosts) + 2 * math.log2(hosts) * links.hop_seconds[1]
    return Step(compute_seconds(config, full=True), link, 0.0)


def predictions(links: Links) -> Iterator[tuple[str, list[Step]]]:
    """What is predicted, by name, for each number of hosts."""
    methods = {
        f"LoRA of 8B, rank {RANK}, `data`": lambda hosts: lora("llama3-8b", hosts, links),
        "full 8B, `data`, float32": lambda hosts: replicas("llama3-8b", hosts, links, "float32"),
        "full 8B, `data`, int8": lambda hosts: replicas("llama3-8b", hosts, links, "int8"),
        "full 8B, `data`, int4": lambda hosts: replicas("llama3-8b", hosts, links, "int4"),
        "full 8B, `fsdp 8` × `data`": lambda hosts: shards("llama3-8b", hosts, links, over_hosts=False),
        "full 8B, `fsdp` of all": lambda hosts: shards("llama3-8b", hosts, links, over_hosts=True),
        "full 70B, `fsdp 8` × `data`": lambda hosts: shards("llama3-70b", hosts, links, over_hosts=False),
        "full 70B, `fsdp` of all": lambda hosts: shards("llama3-70b", hosts, links, over_hosts=True),
    }
    for name, method in methods.items():
        yield name, [method(hosts) for hosts in HOSTS]


def table(links: Links) -> str:
    """The predictions in Markdown."""
    lines = ["| method | computes, ms |" + "".join(f" {hosts} host{'s' * (hosts > 1)} |" for hosts in HOSTS)]
    lines.append("| --- | ---: |" + " ---: |" * len(HOSTS))
    for name, steps in predictions(links):
        cells = []
        for step in steps:
            worst, best = step.shares
            cells.append(f"{1e3 * (step.link + step.after):,.1f} ms, {worst:.1%} to {best:.1%}")
        lines.append(f"| {name} | {1e3 * steps[0].compute:,.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(Links()), end="")
